#include "sim/mask.hpp"

#include <gmock/gmock.h>

#include <limits>

namespace hae {
namespace {

using Bidirectional = MaskRule::Bidirectional;
using ::testing::ElementsAre;

SequenceInfo info_with(std::vector<Index> image, MaskRule rule, Index prompt) {
  SequenceInfo info;
  info.layers = 1;
  info.tokens = static_cast<Index>(image.size());
  info.prompt = prompt;
  info.image = std::move(image);
  info.masks = {rule};
  return info;
}

std::vector<Range> visible(const SequenceInfo& info, Index query) {
  std::vector<Range> ranges;
  Mask(info, 0).visible(query, ranges);
  return ranges;
}

// Ten tokens, window 4 (self and three before), image tokens 2 .. 7.
const std::vector<Index> kImage = {-1, -1, 0, 0, 0, 0, 0, 0, -1, -1};

TEST(Mask, AWindowCountsItsOwnKey) {
  const SequenceInfo info = info_with(kImage, {4, Bidirectional::none}, 10);
  EXPECT_THAT(visible(info, 9), ElementsAre(Range{6, 10}));
  EXPECT_THAT(visible(info, 2), ElementsAre(Range{0, 3}));
}

TEST(Mask, APictureSeesAllOfItselfWhateverTheWindow) {
  const SequenceInfo info = info_with(kImage, {4, Bidirectional::image}, 10);
  EXPECT_THAT(visible(info, 2), ElementsAre(Range{0, 8}));  // 8 keys
  EXPECT_THAT(visible(info, 7), ElementsAre(Range{2, 8}));
  EXPECT_THAT(visible(info, 9), ElementsAre(Range{6, 10}));
}

TEST(Mask, AWindowCanBoundThePictureBothWays) {
  const SequenceInfo info = info_with(kImage, {4, Bidirectional::image_in_window}, 10);
  EXPECT_THAT(visible(info, 2), ElementsAre(Range{0, 6}));  // 6 keys
  EXPECT_THAT(visible(info, 7), ElementsAre(Range{4, 8}));
}

TEST(Mask, AWindowWiderThanTheSequenceIsNone) {
  const SequenceInfo info =
      info_with(kImage, {std::numeric_limits<Index>::max(), Bidirectional::image_in_window}, 10);
  EXPECT_THAT(visible(info, 3), ElementsAre(Range{0, 8}));
}

TEST(Mask, InterleavedPicturesSeeOnlyTheirOwn) {
  const SequenceInfo info = info_with({5, 9, 5, 9, -1}, {0, Bidirectional::image}, 5);
  EXPECT_THAT(visible(info, 0), ElementsAre(Range{0, 1}, Range{2, 3}));
  EXPECT_THAT(visible(info, 1), ElementsAre(Range{0, 2}, Range{3, 4}));
  EXPECT_THAT(visible(info, 4), ElementsAre(Range{0, 5}));
}

TEST(Mask, DecodedImageTokensAreCausal) {
  const SequenceInfo info = info_with({0, 0, 0, 0}, {0, Bidirectional::image}, 2);
  EXPECT_THAT(visible(info, 0), ElementsAre(Range{0, 2}));
  EXPECT_THAT(visible(info, 2), ElementsAre(Range{0, 3}));
}

}  // namespace
}  // namespace hae
