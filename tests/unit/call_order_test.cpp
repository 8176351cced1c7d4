#include "distributed/call_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace reef {
namespace {

const std::vector<int> kRanks = {0, 1, 2};

struct Made : CallOrder {
  Made(int rank, const std::vector<std::string>& calls, std::size_t made) : CallOrder(rank) {
    begin_group("all", kRanks);
    for (std::size_t i = 0; i < made; ++i) add("all", calls[i]);
  }
};

std::vector<std::string> program(std::mt19937& random, std::size_t calls) {
  std::vector<std::string> made;
  for (std::size_t i = 0; i < calls; ++i) made.push_back("call " + std::to_string(random() % 3));
  return made;
}

// What a record does not say any more is not compared.
std::optional<std::int64_t> expected(const std::vector<std::string>& a, std::size_t made_a,
                                     const std::vector<std::string>& b, std::size_t made_b) {
  const std::size_t end = std::min(made_a, made_b);
  const std::size_t most = std::max(made_a, made_b);
  for (std::size_t i = most - std::min(most, CallsMade::kKept); i < end; ++i) {
    if (a[i] != b[i]) return static_cast<std::int64_t>(i);
  }
  return std::nullopt;
}

TEST(CallOrder, RanksThatMakeTheSameCallsNeverDifferWhenEitherIsLate) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto calls = program(random, random() % (2 * CallsMade::kKept));
    const std::size_t a = random() % (calls.size() + 1), b = random() % (calls.size() + 1);
    EXPECT_FALSE(Made(0, calls, a).difference(Made(1, calls, b).record())) << a << " and " << b;
  }
}

TEST(CallOrder, TheFirstDifferenceIsFoundWhereverItIsKnown) {
  constexpr std::size_t kCalls = 2 * CallsMade::kKept;
  std::mt19937 random(8);
  int found = 0;
  for (int round = 0; round < 1000; ++round) {
    const auto calls = program(random, kCalls);
    auto others = calls;
    for (std::size_t i = random() % kCalls; i < others.size(); ++i)
      others[i] = "call " + std::to_string(random() % 3);
    const std::size_t a = random() % (kCalls + 1), b = random() % (kCalls + 1);
    const auto right = expected(calls, a, others, b);
    const auto difference = Made(0, calls, a).difference(Made(1, others, b).record());
    ASSERT_EQ(difference.has_value(), right.has_value()) << "round " << round;
    if (!right) continue;
    ++found;
    EXPECT_EQ(difference->number, *right);
    EXPECT_EQ(difference->group, "all");
    EXPECT_EQ(difference->ranks, kRanks);
    // Who looks at whom makes no difference.
    EXPECT_EQ(Made(1, others, b).difference(Made(0, calls, a).record())->number, *right);
  }
  EXPECT_GT(found, 100);
}

TEST(CallOrder, EachGroupHasAnOrderOfItsOwn) {
  CallOrder a(0), b(1);
  for (CallOrder* const each : {&a, &b}) {
    each->begin_group("all of them", kRanks);
    each->begin_group("a subgroup", {0, 1});
  }
  a.add("all of them", "x");
  a.add("a subgroup", "y");
  b.add("a subgroup", "y");
  b.add("all of them", "x");
  EXPECT_FALSE(a.difference(b.record()));
  b.add("a subgroup", "z");
  a.add("a subgroup", "two\nlines");
  ASSERT_TRUE(a.difference(b.record()));
  EXPECT_EQ(a.difference(b.record())->group, "a subgroup");
  b.end_group("a subgroup");
  b.add("a subgroup", "nobody hears of it");
  EXPECT_FALSE(a.difference(b.record()));
  EXPECT_FALSE(a.difference(""));
}

TEST(CallOrder, WhatSeveralThreadsCallHasNoOrder) {
  Made a(0, {"x", "x"}, 2), b(1, {"x", "y"}, 2);
  EXPECT_TRUE(a.difference(b.record()));
  std::thread([&] {
    const ServesProgram serves;
    a.add("all", "what a lane does is not of the program's order");
  }).join();
  EXPECT_EQ(a.difference(b.record())->number, 1);
  std::thread([&] { a.add("all", "z"); }).join();
  EXPECT_FALSE(a.difference(b.record()));
  EXPECT_FALSE(b.difference(a.record()));
}

// Programs of calls, of which some are a shard's, that end it and begin others of the same name; what a rank
// says is what it was at some time.
TEST(CallOrder, ARankThatHasEndedAShardWillNotMakeItsCalls) {
  struct Step {
    enum Kind { kCall, kOfShard, kBegin, kEnd } kind;
  };
  const char* begins = CallsMade::kShardBegins;
  const auto run = [&](CallOrder& order, const std::vector<Step>& steps, std::size_t made) {
    order.begin_group("all", kRanks);
    for (std::size_t i = 0; i < made; ++i) {
      if (steps[i].kind == Step::kEnd) order.end_shard("all", "shard 1");
      if (steps[i].kind == Step::kCall) order.add("all", "reef::barrier");
      if (steps[i].kind == Step::kOfShard) order.add("all", "the backward pass", "shard 1");
      if (steps[i].kind == Step::kBegin) order.add("all", begins);
    }
  };
  std::mt19937 random(9);
  for (int round = 0; round < 500; ++round) {
    begins = round % 2 == 0 ? CallsMade::kShardBegins : CallsMade::kLocalUpdatesBegin;
    std::vector<Step> steps = {{Step::kBegin}};
    bool lives = true;
    for (int i = 0; i < 30; ++i) {
      auto kind = static_cast<Step::Kind>(random() % 4);
      if (kind == Step::kOfShard && !lives) kind = Step::kBegin;
      if (kind == Step::kEnd && !lives) kind = Step::kCall;
      if (kind == Step::kBegin) lives = true;
      if (kind == Step::kEnd) lives = false;
      steps.push_back({kind});
    }
    CallOrder a(0), b(1), c(2);
    run(a, steps, random() % (steps.size() + 1));
    run(b, steps, random() % (steps.size() + 1));
    EXPECT_FALSE(a.difference(b.record())) << "round " << round;
    // One that ends it early, and does nothing more, is found out by the next of its calls, and not before.
    const std::size_t stops = 1 + random() % (steps.size() - 1);
    auto early = steps;
    early.resize(stops);
    early.push_back({Step::kEnd});
    run(c, early, early.size());
    const auto comes = std::find_if(
        steps.begin() + static_cast<std::ptrdiff_t>(stops), steps.end(),
        [](const Step& step) { return step.kind == Step::kOfShard || step.kind == Step::kBegin; });
    CallOrder all(0);
    run(all, steps, steps.size());
    EXPECT_EQ(all.difference(c.record()).has_value(), comes != steps.end() && comes->kind == Step::kOfShard)
        << "round " << round;
  }
}

TEST(CallOrder, TheNextFourOfEachGroupAreLookedAt) {
  CallOrder order(5);
  EXPECT_TRUE(order.watched().empty());
  order.begin_group("all", {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(order.watched(), (std::vector<int>{0, 1, 6, 7}));
  order.begin_group("far apart", {5, 3});
  EXPECT_EQ(order.watched(), (std::vector<int>{0, 1, 3, 6, 7}));
  order.end_group("all");
  EXPECT_EQ(order.watched(), std::vector<int>{3});
}

TEST(CallOrder, TheTextSaysWhichRankStandsWhere) {
  struct Row {
    std::vector<std::vector<std::string>> calls;  ///< of each rank
    const char* text;
  };
  const std::vector<Row> rows = {
      {{{"a", "pass"}, {"a", "state dict"}, {"a", "pass"}},
       "call 2 that all make alike in this group is pass on ranks 0 and 2, and state dict on rank 1"},
      {{{"a", "pass"}, {"a", "state dict"}, {"a"}},
       "call 2 that all make alike in this group is pass on rank 0, and state dict on rank 1; rank 2 has not "
       "come to it yet"},
      {{{"x"}, {"y"}, {"z"}},
       "call 1 that all make alike in this group is x on rank 0, y on rank 1, and z on rank 2"},
  };
  for (const Row& row : rows) {
    std::map<int, std::string> records;
    for (const int rank : {1, 2}) {
      const auto& calls = row.calls[static_cast<std::size_t>(rank)];
      records[rank] = Made(rank, calls, calls.size()).record();
    }
    const Made own(0, row.calls[0], row.calls[0].size());
    const auto difference = own.difference(records[1]);
    ASSERT_TRUE(difference) << row.text;
    EXPECT_EQ(own.text(*difference, records), std::string("the ranks are out of step: ") + row.text);
  }
  Made own(0, {}, 0), ended(2, {}, 0);
  own.add("all", "the backward pass of step 2", "shard 1");
  ended.end_shard("all", "shard 1");
  const auto difference = own.difference(ended.record());
  ASSERT_TRUE(difference);
  EXPECT_EQ(
      own.text(*difference, {{2, ended.record()}}),
      "the ranks are out of step: call 1 that all make alike in this group is the backward pass of step 2 of "
      "shard 1 on rank 0; rank 2 has ended shard 1; rank 1 has not come to it yet");
}

}  // namespace
}  // namespace reef
