#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "reference/options.hpp"
#include "reference/selection.hpp"
#include "sim/policy.hpp"

namespace hae::reference {

/// Where a baseline that prunes visual tokens in the prefill decides, and where its choice acts: always in
/// the layers after the deciding one.
struct VisualPruningPlan {
  std::string_view policy;    ///< as warnings name it
  std::vector<Index> layers;  ///< that decide, ascending
  Effect effect = Effect::within;
  bool clears_earlier_layers = false;  ///< after the prefill the choice leaves all other layers, too

  /// Whether a layer decides: there must be a layer in which its choice acts.
  [[nodiscard]] bool decides(const SequenceInfo& info, Index layer) const;
};

/// The option `layers` of the policies that decide more than once.
constexpr OptionInfo deciding_layers_option(std::string_view published) {
  return {"layers", published, "ascending layers, as 2/6",
          "that decide, each for the layers after it; a model may have fewer"};
}

/// throws  ConfigError when they do not ascend, or one is below `least`
std::vector<Index> parse_deciding_layers(const Options& options, Index least);

/// What the rows that score paid each prompt token in one layer: mean over all query heads, rows ascending,
/// in double.
struct TokenAttention {
  std::vector<double> sums;     ///< [P]
  std::vector<double> largest;  ///< [P]
  std::vector<Index> rows;      ///< [P] rows that can see the token
};

/// State of a policy that scores visual tokens by some rows of a layer and drops some of them from the layers
/// after it. Candidates are the visual prompt tokens that are still there and that at least one of the rows
/// can see; others have no score and are kept and counted.
class VisualPruningRun : public Run {
 public:
  VisualPruningRun(const SequenceInfo& info, VisualPruningPlan plan);

  void begin_layer(Index layer, const LayerVectors& vectors) override;
  void observe(const Rows& rows) override;
  Decision prune(Index layer, const LayerCache& cache) override;
  Decision balance(const std::vector<LayerCache>& caches) override;
  std::unique_ptr<LayerDecode> decode(Index layer) override;
  [[nodiscard]] Limits limits(Index /*layer*/, Index /*lane*/) const override { return {}; }

 protected:
  /// Whether the row of a prompt token scores the visual ones: every text row, unless overridden.
  [[nodiscard]] virtual bool scores(Index query) const { return !info_.is_visual(query); }

  /// What goes of the candidates (ascending, not empty), with the scores for the log.
  ///
  /// stage  index into the plan's layers
  [[nodiscard]] virtual std::vector<Scored> choose(std::size_t stage, const std::vector<Index>& candidates,
                                                   const TokenAttention& attention) const = 0;

  [[nodiscard]] const SequenceInfo& info() const { return info_; }

 private:
  struct Dropped {
    Index layer;  ///< that decided
    Scored token;
  };

  [[nodiscard]] std::vector<std::string> reservations() const;
  [[nodiscard]] std::vector<Index> candidates() const;

  const SequenceInfo& info_;
  VisualPruningPlan plan_;
  Index visual_tokens_ = 0;  ///< of the prompt
  bool is_deciding_ = false;
  TokenAttention attention_;   ///< of the layer in its prefill
  std::vector<bool> is_gone_;  ///< [P]
  std::vector<Dropped> dropped_;
};

}  // namespace hae::reference
