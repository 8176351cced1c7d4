// Phases of a rank, written out.
#include "pipeline/phases.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace reef {
namespace {

/// Stream 0 is of chunk 0, stream 1 of chunk 5; there are `micro_batches` of each.
std::string text_of(const std::vector<PipelinePhase>& phases, std::uint32_t micro_batches = 100) {
  const auto pass_of = [&](std::uint32_t stream, std::uint32_t number) -> std::optional<PipelineTurn> {
    if (number >= micro_batches) return std::nullopt;
    return PipelineTurn{5 * stream, number};
  };
  std::string text;
  for (const PipelineAction& action : actions_of(phases, pass_of))
    text += (text.empty() ? "" : " ") + action.text();
  return text;
}

TEST(PipelinePhases, EachStreamCountsForItself) {
  EXPECT_EQ(text_of({}), "");
  EXPECT_EQ(text_of({{0, "F0"}, {2, "F0"}, {1, "F1 F0"}}), "0F0 0F1 5F0 0F2");
  EXPECT_EQ(text_of({{2, "F0 F1"}, {2, "B1 B0"}}), "0F0 5F0 0F1 5F1 5B0 0B0 5B1 0B1");
  EXPECT_EQ(text_of({{1, "B0"}, {1, "I0 W0"}, {1, "B0"}}), "0B0 0I1 0W1 0B2");
}

TEST(PipelinePhases, AWeightGradientIsThatOfTheInputGradientWhichWasFirst) {
  EXPECT_EQ(text_of({{2, "I0 I1"}, {1, "W1 W0 W1 W0"}}), "0I0 5I0 0I1 5I1 5W0 0W0 5W1 0W1");
  EXPECT_EQ(text_of({{2, "I1 I0"}, {4, "W*"}}), "5I0 0I0 5I1 0I1 5W0 0W0 5W1 0W1");
  EXPECT_EQ(text_of({{1, "I1 I0 W0"}, {2, "W*"}}), "5I0 0I0 0W0 5W0");
  EXPECT_EQ(text_of({{1, "W* F0 I0 W1"}}), "0F0 0I0 0W0");  // what is left comes last
  EXPECT_EQ(text_of({{1, "I1 I0"}, {1, "I1"}}), "5I0 0I0 5I1 5W0 0W0 5W1");
}

TEST(PipelinePhases, PassesThatThereAreNotAreLeftOut) {
  EXPECT_EQ(text_of({{3, "F0"}, {3, "I0 W0"}}, 2), "0F0 0F1 0I0 0W0 0I1 0W1");
  EXPECT_EQ(text_of({{3, "I0 B1"}, {3, "W*"}}, 1), "0I0 5B0 0W0");
}

}  // namespace
}  // namespace reef
