// Every call in every state, and programs of calls at random beside a model.
#include "shard/flat_bucket.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "distributed/comm_lane.h"

namespace reef {
namespace {

using at::Tensor;
using State = FlatBucket::State;

constexpr std::int64_t kElements = 1024;

struct NoLane final : CommLane {
  std::uint64_t submit(std::function<void()>, c10::ArrayRef<Tensor>) override { return 0; }
  void wait(std::uint64_t) override {}
  bool wait_for(std::uint64_t, std::chrono::milliseconds) override { return true; }
  void wait_on_host(std::uint64_t) override {}
  void drain() noexcept override {}
};

Tensor filled(double value) { return at::full({kElements}, value, at::kFloat); }
FlatBucket bucket_of_two() {
  return {kElements, at::kFloat, {{0, {10, 3}, {3, 1}, 1}, {256, {500}, {1}, 0}}};
}

// "" if whoever has the tensor reads it.
std::string refusal(const Tensor& tensor) {
  if (!tensor.defined()) return "";
  try {
    tensor.const_data_ptr();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// A bucket in some state, and what was done to bring it there.
struct Start {
  const char* name;
  State state;
  void (*make)(FlatBucket&, CommLane&);
};
/// A call: to which state it leads from which start. From all others it is refused.
struct Call {
  const char* name;
  void (*make)(FlatBucket&, CommLane&);
  std::map<std::string, State> to;
};

void every_call_in_every_state(const std::vector<Start>& starts, const std::vector<Call>& calls,
                               bool of_parameters) {
  NoLane lane;
  for (const Start& start : starts) {
    for (const Call& call : calls) {
      SCOPED_TRACE(std::string(call.name) + " from " + start.name);
      FlatBucket bucket = bucket_of_two();
      start.make(bucket, lane);
      ASSERT_EQ(bucket.state(), start.state);
      const Tensor whole = bucket.whole();
      const Tensor own = bucket.own();
      const std::string refused = refusal(whole);
      const auto to = call.to.find(start.name);
      if (to != call.to.end()) {
        call.make(bucket, lane);
        EXPECT_EQ(bucket.state(), to->second);
      } else {
        EXPECT_THROW(call.make(bucket, lane), c10::Error);
        EXPECT_EQ(bucket.state(), start.state);
        EXPECT_TRUE(bucket.whole().is_same(whole));
        EXPECT_TRUE(bucket.own().is_same(own));
        EXPECT_EQ(refusal(whole), refused);
      }
      if (!of_parameters) continue;
      EXPECT_EQ(refusal(whole).empty(), bucket.state() == State::kHere);
      bucket.leave("nobody knows");
      EXPECT_EQ(refusal(whole).empty(), bucket.state() == State::kHere);
    }
  }
}

TEST(FlatBucket, EveryCallOnParametersInEveryState) {
  const std::vector<Start> starts = {
      {"here", State::kHere, [](auto& b, auto&) { b.take(filled(1), filled(2)); }},
      {"away", State::kAway, [](auto& b, auto&) { b.take(filled(1), filled(2)), b.drop("away"); }},
      {"stale", State::kStale, [](auto& b, auto&) { b.take(filled(1), filled(2)), b.doubt("stale"); }},
      {"arriving", State::kMoving,
       [](auto& b, auto& lane) { b.take(filled(1), filled(2)), b.drop("away"), b.come(filled(3), lane, 7); }},
      {"coming", State::kMoving,
       [](auto& b, auto& lane) { b.take(filled(1), filled(2)), b.doubt("stale"), b.come(lane, 7); }},
  };
  const std::vector<Call> calls = {
      {"confirm", [](auto& b, auto&) { b.confirm(); }, {{"stale", State::kHere}}},
      {"drop", [](auto& b, auto&) { b.drop("away"); }, {{"here", State::kAway}, {"stale", State::kAway}}},
      {"come into memory of its own",
       [](auto& b, auto& lane) { b.come(filled(3), lane, 7); },
       {{"away", State::kMoving}}},
      {"come where they lie", [](auto& b, auto& lane) { b.come(lane, 7); }, {{"stale", State::kMoving}}},
      {"arrive", [](auto& b, auto&) { b.arrive(); }, {{"arriving", State::kHere}, {"coming", State::kHere}}},
      {"lose", [](auto& b, auto&) { b.lose(); }, {{"arriving", State::kAway}, {"coming", State::kStale}}},
  };
  every_call_in_every_state(starts, calls, /*of_parameters=*/true);
}

TEST(FlatBucket, EveryCallOnGradientsInEveryState) {
  static Tensor gradient;  // of a program, that lies in what is lent
  const std::vector<Start> starts = {
      {"new", State::kAway, [](auto&, auto&) {}},
      {"here", State::kHere, [](auto& b, auto&) { b.make(filled(0)); }},
      {"sent", State::kMoving,
       [](auto& b, auto& lane) { b.make(filled(0)), b.go(filled(1), true, lane, 7); }},
      {"given", State::kMoving,
       [](auto& b, auto& lane) { b.make(filled(0)), b.go(filled(1), false, lane, 7); }},
      {"lent", State::kLent,
       [](auto& b, auto&) { gradient = b.places()[0].of(b.make(filled(0))), b.lend(); }},
      {"lent and free", State::kLent, [](auto& b, auto&) { b.make(filled(0)), b.lend(); }},
  };
  const auto one = [] { return std::size_t{1}; };
  static const auto owners = one;
  const std::vector<Call> calls = {
      {"make",
       [](auto& b, auto&) { b.make(filled(0)); },
       {{"new", State::kHere},
        {"here", State::kHere},
        {"sent", State::kMoving},
        {"lent", State::kHere},
        {"lent and free", State::kHere}}},
      {"go", [](auto& b, auto& lane) { b.go(filled(1), true, lane, 7); }, {{"here", State::kMoving}}},
      {"go for good",
       [](auto& b, auto& lane) { b.go(filled(1), false, lane, 7); },
       {{"here", State::kMoving}}},
      {"settle", [](auto& b, auto&) { b.settle(); }, {{"sent", State::kHere}, {"given", State::kAway}}},
      {"lend", [](auto& b, auto&) { b.lend(); }, {{"here", State::kLent}}},
      {"forget",
       [](auto& b, auto&) { b.forget(); },
       {{"new", State::kAway},
        {"here", State::kAway},
        {"sent", State::kAway},
        {"given", State::kAway},
        {"lent", State::kAway},
        {"lent and free", State::kAway}}},
      {"take back",
       [](auto& b, auto&) { b.take_back(filled(0), owners); },
       {{"new", State::kAway},
        {"here", State::kHere},
        {"sent", State::kMoving},
        {"given", State::kMoving},
        {"lent", State::kHere},
        {"lent and free", State::kAway}}},
      {"take back what others have",
       [](auto& b, auto&) { b.take_back(filled(0), [] { return std::size_t{0}; }); },
       {{"new", State::kAway},
        {"here", State::kHere},
        {"sent", State::kMoving},
        {"given", State::kMoving},
        {"lent", State::kAway},
        {"lent and free", State::kAway}}},
  };
  every_call_in_every_state(starts, calls, /*of_parameters=*/false);
  gradient.reset();
}

TEST(FlatBucket, WhatIsInUseIsNotDropped) {
  FlatBucket bucket = bucket_of_two();
  bucket.take(filled(1), filled(2));
  bucket.begin_use();
  bucket.begin_use();
  EXPECT_THROW(bucket.drop("away"), c10::Error);
  bucket.end_use();
  EXPECT_THROW(bucket.drop("away"), c10::Error);
  EXPECT_EQ(refusal(bucket.whole()), "");
  EXPECT_EQ(bucket.whole().sum().item<float>(), kElements);
  bucket.end_use();
  bucket.drop("away");
  EXPECT_NE(refusal(bucket.whole()).find("away"), std::string::npos);
}

// Whoever may read parameters reads those that came last, and whoever may not is told why, last.
TEST(FlatBucket, ParametersAreReadWhereTheyAreHereAndNowhereElse) {
  NoLane lane;
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    FlatBucket bucket = bucket_of_two();
    bucket.take(filled(0), filled(0));
    const Tensor parameter = bucket.places()[1].of(bucket.whole());  // of the program
    double value = 0;
    double next = 0;  // what a lane makes of them
    bool lies_there = false;
    std::string said;
    std::weak_ptr<const int> held;
    for (int step = 0; step < 60; ++step) {
      const State before = bucket.state();
      const std::string message = "message " + std::to_string(step);
      bool released = false;
      switch (random() % 6) {
        case 0:
          bucket.doubt(said = message);
          break;
        case 1:
          if (before == State::kStale) bucket.confirm();
          break;
        case 2:
          if (before != State::kHere && before != State::kStale) break;
          bucket.drop(said = message);
          released = true;
          break;
        case 3:
          if (before != State::kAway && before != State::kStale) break;
          next = step;
          lies_there = before == State::kStale;
          lies_there ? bucket.come(lane, 7) : bucket.come(filled(next), lane, 7);
          break;
        case 4:
          if (before != State::kMoving) break;
          released = true;
          if (random() % 2 == 0) {
            bucket.lose();
            break;
          }
          if (lies_there) unchecked(bucket.whole()).fill_(next);
          bucket.arrive();
          value = next;
          break;
        default: {
          const auto number = std::make_shared<const int>(step);
          bucket.hold(number);
          held = number;
        }
      }
      ASSERT_FALSE(released && !held.expired());
      const bool here = bucket.state() == State::kHere;
      if (here) {
        ASSERT_EQ(refusal(parameter), "");
        ASSERT_TRUE(parameter.eq(value).all().item<bool>()) << value;
      } else {
        ASSERT_NE(refusal(parameter).find(said), std::string::npos) << refusal(parameter);
      }
      const bool has_memory = unchecked(bucket.whole()).const_data_ptr() != nullptr;
      ASSERT_EQ(has_memory,
                here || bucket.state() == State::kStale || (bucket.state() == State::kMoving && lies_there));
    }
    bucket.leave("nobody knows");
    EXPECT_EQ(refusal(parameter).empty(), bucket.state() == State::kHere);
  }
}

// Memory in which a tensor of somebody else's lies is never used again, and what nobody else has always is.
TEST(FlatBucket, MemoryOfGradientsIsUsedAgainUnlessSomebodyHasIt) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    FlatBucket bucket = bucket_of_two();
    std::vector<Tensor> gradients(2);  // which the owner knows
    std::vector<Tensor> others;        // which a program has kept
    for (int pass = 0; pass < 20; ++pass) {
      const auto in = [](const Tensor& one, const Tensor& other) { return same_storage(one, other); };
      const State before = bucket.state();
      const Tensor lies = gradients[0].defined() ? gradients[0] : gradients[1];
      const bool others_have =
          std::any_of(others.begin(), others.end(), [&](const Tensor& other) { return in(other, lies); });
      bucket.take_back(filled(0), [&] {
        std::size_t known = 0;
        for (const Tensor& gradient : gradients) known += in(gradient, bucket.whole()) ? 1 : 0;
        return known;
      });
      if (before == State::kLent) {
        ASSERT_EQ(bucket.state() == State::kHere, lies.defined() && !others_have);
      }
      const Tensor& flat = bucket.make(filled(0));
      for (const Tensor& other : others) ASSERT_FALSE(in(other, flat));
      if (before == State::kLent && lies.defined()) {
        ASSERT_EQ(in(lies, flat), !others_have);
      }
      ASSERT_EQ(flat.narrow(0, 30, 226).abs().sum().item<float>(), 0);
      ASSERT_EQ(flat.narrow(0, 756, kElements - 756).abs().sum().item<float>(), 0);
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        gradients[i] = random() % 3 != 0 ? bucket.places()[i].of(flat).fill_(pass) : Tensor();
        if (gradients[i].defined() && random() % 4 == 0) others.push_back(bucket.places()[i].of(flat));
      }
      if (random() % 3 == 0) others.clear();
      if (random() % 4 != 0) bucket.lend();
    }
  }
}

}  // namespace
}  // namespace reef
