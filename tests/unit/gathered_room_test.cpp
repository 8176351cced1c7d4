// Laws of GatheredRoom over random steps.
#include "gathered_room.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace reef {
namespace {

/// One moment of a step: what is alive beside gathered parameters, how many buckets operators need, and how
/// many would be used again if they stayed, those that are used next first.
struct Moment {
  std::int64_t other_bytes;
  std::size_t needed, useful;
};
struct Step {
  std::vector<std::int64_t> buckets;
  std::vector<Moment> moments;
};

// With the room that there is always, for the largest bucket twice.
std::int64_t gathered_bytes(const Step& step, const Moment& now, std::int64_t room_bytes) {
  room_bytes = std::max(room_bytes, 2 * *std::max_element(step.buckets.begin(), step.buckets.end()));
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < std::max(now.needed, now.useful); ++i) {
    if (i < now.needed || bytes + step.buckets[i] <= room_bytes) bytes += step.buckets[i];
  }
  return bytes;
}

std::int64_t peak_of(const Step& step, std::int64_t room_bytes) {
  std::int64_t peak = 0;
  for (const Moment& now : step.moments)
    peak = std::max(peak, now.other_bytes + gathered_bytes(step, now, room_bytes));
  return peak;
}

/// As a budget would see it: what was over it has left, and comes back.
std::int64_t fitting_bytes(const Step& step, std::int64_t room_bytes, std::int64_t budget_bytes) {
  const std::int64_t left = budget_bytes - peak_of(step, room_bytes);
  if (left < 0) return left;
  std::int64_t most = 0;
  for (const Moment& now : step.moments) most = std::max(most, gathered_bytes(step, now, room_bytes));
  return most + left;
}

struct Steps {
  std::mt19937 random;
  std::int64_t number(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  }
  std::vector<std::int64_t> buckets(bool alike) {
    std::vector<std::int64_t> bytes(static_cast<std::size_t>(number(2, 12)), number(1, 50));
    for (std::int64_t& each : bytes) {
      if (!alike) each = number(1, 50);
    }
    return bytes;
  }
  Step make(const std::vector<std::int64_t>& buckets) {
    Step step{buckets, std::vector<Moment>(static_cast<std::size_t>(number(1, 12)))};
    for (Moment& now : step.moments) {
      now.needed = static_cast<std::size_t>(number(0, 2));
      now.useful = static_cast<std::size_t>(number(0, static_cast<std::int64_t>(buckets.size())));
      now.other_bytes = number(0, 1000);
    }
    return step;
  }
};

std::int64_t total(const std::vector<std::int64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

// Buckets of one size, as almost all are: of what the step that repeats leaves, less than one remains, and no
// page is evicted for it.
TEST(GatheredRoom, TakesWhatAStepLeavesAndNothingElse) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    Steps steps{std::mt19937(seed)};
    const auto buckets = steps.buckets(true);
    const Step step = steps.make(buckets);
    const std::int64_t budget = peak_of(step, 0) + steps.number(0, 2 * total(buckets));
    GatheredRoom room(total(buckets));
    for (std::size_t i = 0; i <= buckets.size(); ++i) {
      const std::int64_t fitting = fitting_bytes(step, room.bytes(), budget);
      ASSERT_GE(fitting, 0) << "seed " << seed << ", step " << i;
      room.after_step(fitting);
      ASSERT_LE(room.bytes(), total(buckets));
    }
    const std::int64_t settled = room.bytes();
    EXPECT_TRUE(peak_of(step, total(buckets)) <= budget || budget - peak_of(step, settled) < buckets.front())
        << "seed " << seed;
    room.after_step(fitting_bytes(step, settled, budget));
    EXPECT_EQ(room.bytes(), settled);
  }
}

// Of any sizes, and steps that differ, as by batch: what one evicted is given back at once, and soon hardly
// any step evicts, although some would with more room.
TEST(GatheredRoom, StepsThatEvictBecomeRare) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    Steps steps{std::mt19937(seed)};
    const auto buckets = steps.buckets(false);
    std::vector<Step> all;
    for (int i = 0; i < 5; ++i) all.push_back(steps.make(buckets));
    std::int64_t budget = 0;
    for (const Step& step : all) budget = std::max(budget, peak_of(step, 0));
    budget += steps.number(0, total(buckets));
    GatheredRoom room(total(buckets));
    std::int64_t patience = GatheredRoom::kSteps;
    std::int64_t spared = 0;
    int evicting = 0;
    for (int i = 0; i < 20000; ++i) {
      const std::int64_t before = room.bytes();
      const std::int64_t fitting =
          fitting_bytes(all[static_cast<std::size_t>(steps.number(0, 4))], before, budget);
      room.after_step(fitting);
      ASSERT_GE(room.bytes(), 0);
      ASSERT_LE(room.bytes(), total(buckets));
      if (fitting < 0) {
        ++evicting;
        EXPECT_EQ(room.bytes(), std::max<std::int64_t>(std::min(before + fitting, before / 2), 0));
        spared = patience;
        patience *= 2;
      } else if (spared > 0) {
        --spared;
        EXPECT_EQ(room.bytes(), before);
      }
    }
    EXPECT_LE(evicting, 22) << "seed " << seed;
  }
}

TEST(GatheredRoom, TakesNothingWhereAStepMustEvictAnyway) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    Steps steps{std::mt19937(seed)};
    const auto buckets = steps.buckets(false);
    const Step step = steps.make(buckets);
    const std::int64_t budget = peak_of(step, 0) - 1;
    GatheredRoom room(total(buckets));
    for (int i = 0; i < 40; ++i) {
      room.after_step(fitting_bytes(step, room.bytes(), budget));
      ASSERT_EQ(room.bytes(), 0);
    }
  }
}

TEST(GatheredRoom, IsNothingWithoutABudget) {
  GatheredRoom room(100);
  room.after_step(60);
  EXPECT_EQ(room.bytes(), 60);
  room.close();
  EXPECT_EQ(room.bytes(), 0);
}

}  // namespace
}  // namespace reef
