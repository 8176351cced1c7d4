#include "chain/price.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "reef/chain_solver.h"
#include "support/chains.h"

namespace reef {
namespace {

using Sizes = std::vector<std::int64_t>;
using Random = std::mt19937_64;

/// Sums of products of powers of up to 2 of the sizes, and their maxima.
class Bytes {
 public:
  Bytes(Random& random, std::size_t dimensions) {
    const std::size_t sums = 1 + random() % 3;
    for (std::size_t sum = 0; sum < sums; ++sum) {
      std::vector<Term>& terms = sums_.emplace_back();
      const std::size_t count = 1 + random() % 3;
      for (std::size_t i = 0; i < count; ++i) {
        Term& term = terms.emplace_back();
        term.factor = random() % 9;
        for (std::size_t d = 0; d < dimensions; ++d) term.powers.push_back(static_cast<int>(random() % 3));
      }
    }
  }
  std::uint64_t operator()(const Sizes& sizes) const {
    std::uint64_t most = 0;
    for (const auto& terms : sums_) {
      std::uint64_t sum = 0;
      for (const Term& term : terms) {
        std::uint64_t product = term.factor;
        for (std::size_t d = 0; d < sizes.size(); ++d) {
          for (int power = 0; power < term.powers[d]; ++power)
            product *= static_cast<std::uint64_t>(sizes[d]);
        }
        sum += product;
      }
      most = std::max(most, sum);
    }
    return most;
  }

 private:
  struct Term {
    std::uint64_t factor;
    std::vector<int> powers;
  };
  std::vector<std::vector<Term>> sums_;
};

/// A chain of two stages whose every number of bytes is such a function of the input's sizes.
struct Network {
  explicit Network(Random& random, std::size_t dimensions) {
    for (int i = 0; i < 16; ++i) bytes.emplace_back(random, dimensions);
    has_output = random() % 2 == 0;
  }
  ChainProfile at(const Sizes& sizes) const {
    ChainProfile profile;
    double elements = 1;
    for (const std::int64_t size : sizes) elements *= static_cast<double>(size);
    for (std::size_t i = 0; i < 2; ++i) {
      const Bytes* const of = &bytes[8 * i];
      StageProfile stage{"stage"};
      stage.output_bytes = of[0](sizes);
      stage.tape_has_output = has_output;
      stage.tape_bytes = of[1](sizes) + (has_output ? stage.output_bytes : 0);
      stage.forward_bytes = stage.output_bytes + of[2](sizes);
      stage.taped_bytes = stage.tape_bytes + stage.output_bytes + of[3](sizes);
      stage.retape_bytes = stage.tape_bytes + of[4](sizes);
      stage.gradient_bytes = of[5]({Sizes(sizes.size(), 1)});
      stage.backward_bytes =
          of[6](sizes) + stage.gradient_bytes + (i > 0 ? profile.stages[0].output_bytes : 0);
      stage.forward_seconds = stage.retape_seconds = stage.backward_seconds = elements;
      profile.stages.push_back(stage);
    }
    return profile;
  }
  std::vector<Bytes> bytes;
  bool has_output;
};

constexpr std::uint64_t StageProfile::*kBytes[] = {
    &StageProfile::output_bytes,  &StageProfile::tape_bytes,   &StageProfile::forward_bytes,
    &StageProfile::taped_bytes,   &StageProfile::retape_bytes, &StageProfile::backward_bytes,
    &StageProfile::gradient_bytes};

struct Measured {
  std::vector<Sizes> sizes;
  std::vector<ChainProfile> profiles;
  void add(const Network& network, const Sizes& of) {
    sizes.push_back(of);
    profiles.push_back(network.at(of));
  }
  std::vector<MeasuredShape> shapes() const {
    std::vector<MeasuredShape> all;
    for (std::size_t i = 0; i < sizes.size(); ++i) all.push_back({sizes[i], &profiles[i]});
    return all;
  }
};

TEST(ChainPrice, IsNeverBelowTheTruthOfSumsMaximaAndPowersAndASoundProfile) {
  Random random(7);
  int priced_shapes = 0, refused = 0;
  for (int round = 0; round < 1500; ++round) {
    const std::size_t dimensions = 1 + random() % 3;
    const Network network(random, dimensions);
    const auto shape = [&] {
      Sizes sizes;
      for (std::size_t d = 0; d < dimensions; ++d)
        sizes.push_back(static_cast<std::int64_t>(8 + random() % 40));
      return sizes;
    };
    Measured measured;
    Sizes first = shape();
    for (std::uint64_t i = 1 + random() % 6; i > 0; --i) {
      Sizes sizes = random() % 2 == 0 ? shape() : first;
      sizes[random() % dimensions] = static_cast<std::int64_t>(8 + random() % 40);
      measured.add(network, sizes);
    }
    for (int target = 0; target < 10; ++target) {
      Sizes sizes = random() % 2 == 0 ? shape() : first;
      sizes[random() % dimensions] = static_cast<std::int64_t>(8 + random() % 40);
      const auto found = priced(measured.shapes(), sizes);
      (found ? priced_shapes : refused) += 1;
      if (!found) continue;
      const ChainProfile truth = network.at(sizes);
      check(*found);
      for (std::size_t i = 0; i < truth.stages.size(); ++i) {
        for (const auto bytes : kBytes) EXPECT_GE(found->stages[i].*bytes, truth.stages[i].*bytes);
        EXPECT_NEAR(found->stages[i].forward_seconds, truth.stages[i].forward_seconds, 1e-6);
      }
      // So whatever is planned for it fits.
      const Schedule schedule = plan_chain(*found, minimum_bytes(*found));
      EXPECT_LE(simulate(truth, schedule).peak_bytes, minimum_bytes(*found));
    }
  }
  EXPECT_GT(priced_shapes, 3000);
  EXPECT_GT(refused, 3000);
}

TEST(ChainPrice, BetweenTwoShapesItIsTheLineAndExactWhereBytesAreLinear) {
  const auto linear = [](std::int64_t n) {
    ChainProfile profile;
    StageProfile stage{"s"};
    const auto of = static_cast<std::uint64_t>(n);
    stage.output_bytes = 12 * of;
    stage.tape_bytes = 7 * of + 5;
    stage.forward_bytes = 13 * of;
    stage.taped_bytes = 20 * of + 5;
    stage.retape_bytes = 8 * of + 5;
    stage.backward_bytes = 30 * of + 1000;
    stage.gradient_bytes = 1000;
    profile.stages.push_back(stage);
    return profile;
  };
  const ChainProfile low = linear(40), high = linear(97);
  const std::vector<MeasuredShape> measured{{{4, 40, 8}, &low}, {{4, 97, 8}, &high}};
  for (std::int64_t n = 41; n < 97; ++n) {
    const auto found = priced(measured, {4, n, 8});
    ASSERT_TRUE(found) << n;
    for (const auto bytes : kBytes) EXPECT_EQ(found->stages[0].*bytes, linear(n).stages[0].*bytes) << n;
  }
}

TEST(ChainPrice, WhatIsNotNearIsNotPriced) {
  Random random(3);
  const Network network(random, 2);
  Measured measured;
  measured.add(network, {8, 100});
  EXPECT_TRUE(priced(measured.shapes(), {8, 113}));  // 1.13 twice is less than 1.3
  EXPECT_FALSE(priced(measured.shapes(), {8, 115}));
  EXPECT_TRUE(priced(measured.shapes(), {8, 80}));
  EXPECT_FALSE(priced(measured.shapes(), {8, 70}));
  EXPECT_TRUE(priced(measured.shapes(), {7, 95}));
  EXPECT_FALSE(priced(measured.shapes(), {7, 80}));  // both together
  EXPECT_FALSE(priced(measured.shapes(), {8, 0}));
  EXPECT_FALSE(priced(measured.shapes(), {8, 100, 1}));
  EXPECT_FALSE(priced({}, {8, 100}));
  measured.add(network, {8, 300});
  EXPECT_TRUE(priced(measured.shapes(), {8, 200}));
  EXPECT_TRUE(priced(measured.shapes(), {7, 200}));
  EXPECT_FALSE(priced(measured.shapes(), {4, 200}));
  EXPECT_FALSE(priced(measured.shapes(), {9, 200}));
  measured.add(network, {8, 2000});
  EXPECT_FALSE(priced(measured.shapes(), {8, 600}));  // the ends are too far from each other
}

TEST(ChainPrice, OtherStagesTellNothing) {
  Random random(3);
  const Network network(random, 1);
  Measured measured;
  measured.add(network, {40});
  measured.add(network, {80});
  measured.profiles[1].stages.pop_back();  // joined there
  EXPECT_FALSE(priced(measured.shapes(), {60}));
  EXPECT_TRUE(priced(measured.shapes(), {42}));
  measured.profiles[0].state_bytes = 17;
  EXPECT_EQ(priced(measured.shapes(), {40 - 1})->state_bytes, 17U);
}

/// Steps whose every shape is new, each within the next number of profiles.
TEST(ChainPrice, FewOfManyShapesAreMeasured) {
  Random random(5);
  const Network network(random, 2);
  const auto measured_of = [&](const std::vector<Sizes>& steps) {
    Measured measured;
    for (const Sizes& sizes : steps) {
      if (!priced(measured.shapes(), sizes)) measured.add(network, sizes);
    }
    return measured.sizes.size();
  };
  std::vector<Sizes> any, rising, falling, tokens;
  for (std::int64_t i = 0; i < 400; ++i) {
    any.push_back({4, 40 + i * 29 % 473});
    rising.push_back({4, 40 + i});
    falling.push_back({4, 440 - i});
    tokens.push_back({4096 / (40 + i), 40 + i});
  }
  EXPECT_LE(measured_of(any), 12U);
  EXPECT_LE(measured_of(rising), 20U);
  EXPECT_LE(measured_of(falling), 11U);
  EXPECT_LE(measured_of(tokens), 40U);
}

}  // namespace
}  // namespace reef
