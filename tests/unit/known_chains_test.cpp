#include "checkpoint/known_chains.h"

#include <gtest/gtest.h>

namespace reef {
namespace {

using State = KnownChains::State;

ChainProfile of_length(std::int64_t length) {
  ChainProfile profile;
  StageProfile stage{"s"};
  stage.output_bytes = stage.forward_bytes = stage.taped_bytes = static_cast<std::uint64_t>(length);
  profile.stages.push_back(stage);
  return profile;
}

TEST(KnownChains, WhatWasUsedLongestAgoGoes) {
  KnownChains known;
  KnownChains::Kind& kind = known.kind("a");
  known.keep(kind, {1}, {1}, of_length(1));
  for (std::int64_t length = 1000; length < 1200; ++length) {
    known.keep(kind, {length * length}, {1}, of_length(length));
    ASSERT_NE(known.find(kind, {1}), nullptr);
    EXPECT_LE(kind.shapes.size(), 64U);
  }
  EXPECT_EQ(known.find(kind, {1001 * 1001}), nullptr);
  EXPECT_NE(known.find(kind, {1199 * 1199}), nullptr);
  for (int i = 0; i < 200; ++i) {
    known.kind("b" + std::to_string(i));
    known.kind("a");
  }
  EXPECT_NE(known.known("a"), nullptr);
  EXPECT_EQ(known.known("b0"), nullptr);
  EXPECT_EQ(known.kind("a").shapes.size(), 64U);
}

TEST(KnownChains, WhatIsPricedDrivesNothingOutThatWasMeasured) {
  KnownChains known;
  KnownChains::Kind& kind = known.kind("a");
  known.keep(kind, {1000}, {1}, of_length(1000));
  known.keep(kind, {2000}, {1}, of_length(2000));
  for (std::int64_t length = 1001; length < 1900; ++length) {
    ASSERT_NE(known.price(kind, {length}), nullptr) << length;
    EXPECT_LE(kind.shapes.size(), 2U + 64U);
  }
  EXPECT_EQ(known.find(kind, {1000})->state, State::kMeasured);
  EXPECT_EQ(known.find(kind, {1899})->state, State::kPriced);
  EXPECT_EQ(known.find(kind, {1001}), nullptr);
}

TEST(KnownChains, WhatHasNotHeldIsNotPricedAnyMoreAndMeasuredAgainOnce) {
  KnownChains known;
  KnownChains::Kind& kind = known.kind("a");
  known.keep(kind, {100}, {1}, of_length(100));
  ASSERT_NE(known.price(kind, {105}), nullptr);
  ASSERT_NE(known.price(kind, {106}), nullptr);
  EXPECT_TRUE(KnownChains::failed(kind, {105}));
  EXPECT_EQ(known.find(kind, {105}), nullptr);
  EXPECT_EQ(known.find(kind, {106}), nullptr);
  EXPECT_EQ(known.price(kind, {105}), nullptr);
  EXPECT_FALSE(KnownChains::failed(kind, {105}));

  EXPECT_TRUE(KnownChains::failed(kind, {100}));
  EXPECT_FALSE(KnownChains::failed(kind, {100}));
  EXPECT_EQ(known.find(kind, {100}), nullptr);
  EXPECT_EQ(known.keep(kind, {100}, {1}, of_length(120)).state, State::kRenewed);
  EXPECT_TRUE(KnownChains::failed(kind, {100}));
  EXPECT_FALSE(KnownChains::failed(kind, {100}));
  EXPECT_EQ(known.find(kind, {100})->profile.stages[0].output_bytes, 120U);
}

TEST(KnownChains, OtherJoinsAreNotPricedFrom) {
  KnownChains known;
  KnownChains::Kind& kind = known.kind("a");
  known.keep(kind, {100}, {1, 1}, of_length(100));
  EXPECT_EQ(known.price(kind, {105})->parts, (std::vector<std::size_t>{1, 1}));
  known.keep(kind, {120}, {2}, of_length(120));
  EXPECT_EQ(known.price(kind, {107}), nullptr);
  EXPECT_NE(known.find(kind, {105}), nullptr);
}

}  // namespace
}  // namespace reef
