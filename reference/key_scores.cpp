#include "reference/key_scores.hpp"

namespace hae::reference {
namespace {

class Scorer final : public PromptScorer {
 public:
  Scorer(KeySelection::Score score, const View<const float, 3>& keys, Index tokens)
      : score_(score), keys_(keys), tokens_(tokens) {}

  [[nodiscard]] std::vector<std::vector<double>> scores() const override {
    std::vector<std::vector<double>> lanes;
    for (Index lane = 0; lane < keys_.extent(0); ++lane) {
      lanes.push_back(score_(keys_[lane], tokens_));
    }
    return lanes;
  }

 private:
  KeySelection::Score score_;
  View<const float, 3> keys_;
  Index tokens_;
};

}  // namespace

std::unique_ptr<PromptScorer> KeySelection::scorer(const SequenceInfo& info,
                                                   const LayerVectors& vectors) const {
  return std::make_unique<Scorer>(score_, vectors.keys, info.prompt);
}

}  // namespace hae::reference
