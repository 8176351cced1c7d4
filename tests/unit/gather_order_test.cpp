#include "gather_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

namespace reef {
namespace {

using Phase = GatherOrder::Phase;

struct Use {
  std::size_t bucket;
  Phase phase;
};

/// Does what is planned, and counts.
class Memory {
 public:
  Memory(std::vector<std::int64_t> bytes, std::int64_t resident_bytes)
      : bytes_(bytes),
        resident_bytes_(resident_bytes),
        there_(bytes.size(), false),
        order_(std::move(bytes)) {}

  void use(const Use& use) {
    std::vector<GatherOrder::Held> held;
    for (std::size_t i = 0; i < there_.size(); ++i) held.push_back({there_[i], i == use.bucket});
    late_ += there_[use.bucket] ? 0 : 1;
    order_.use(use.bucket, use.phase);
    const GatherOrder::Moves moves = order_.plan({use.bucket}, held, resident_bytes_);
    for (const std::size_t bucket : moves.drop) {
      EXPECT_TRUE(there_[bucket]);
      EXPECT_NE(bucket, use.bucket);
      there_[bucket] = false;
    }
    for (const std::size_t bucket : moves.fetch) {
      EXPECT_FALSE(there_[bucket]);
      there_[bucket] = true;
      ++fetches_;
    }
    ASSERT_TRUE(there_[use.bucket]);
    EXPECT_LE(bytes(), std::max(resident_bytes_, 2 * *std::max_element(bytes_.begin(), bytes_.end())));
  }
  /// A step; how many fetches it had, and how many of them only when they were needed.
  std::pair<int, int> step(const std::vector<Use>& uses) {
    fetches_ = late_ = 0;
    for (const Use& one : uses) use(one);
    there_.assign(there_.size(), false);
    order_.end_step();
    return {fetches_, late_};
  }
  /// Of an evaluation: nobody says that it is over.
  std::pair<int, int> pass(const std::vector<Use>& uses) {
    fetches_ = late_ = 0;
    for (const Use& one : uses) use(one);
    return {fetches_, late_};
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < there_.size(); ++i) sum += there_[i] ? bytes_[i] : 0;
    return sum;
  }

 private:
  std::vector<std::int64_t> bytes_;
  std::int64_t resident_bytes_;
  std::vector<bool> there_;
  GatherOrder order_;
  int fetches_ = 0;
  int late_ = 0;
};

/// The fewest fetches with room for so many buckets of one size, over all ways to drop.
int fewest(const std::vector<Use>& uses, std::size_t buckets, int room) {
  std::map<unsigned, int> best = {{0, 0}};
  for (const Use& use : uses) {
    std::map<unsigned, int> next;
    const auto reach = [&](unsigned set, int cost) {
      const auto [at, fresh] = next.emplace(set, cost);
      if (!fresh) at->second = std::min(at->second, cost);
    };
    const unsigned bit = 1U << use.bucket;
    for (const auto& [set, cost] : best) {
      if ((set & bit) != 0) {
        reach(set, cost);
        continue;
      }
      for (unsigned kept = 0; kept < 1U << buckets; ++kept) {
        if ((kept & ~set) == 0 && __builtin_popcount(kept) < room) reach(kept | bit, cost + 1);
      }
    }
    best = std::move(next);
  }
  int least = 1 << 30;
  for (const auto& [set, cost] : best) least = std::min(least, cost);
  return least;
}

std::vector<Use> forward_and_backward(std::size_t buckets) {
  std::vector<Use> uses;
  for (std::size_t i = 0; i < buckets; ++i) uses.push_back({i, Phase::kForward});
  for (std::size_t i = buckets; i-- > 0;) uses.push_back({i, Phase::kBackward});
  return uses;
}

TEST(GatherOrder, WithRoomEveryBucketIsFetchedOnceAStep) {
  Memory memory(std::vector<std::int64_t>(7, 10), 70);
  for (int step = 0; step < 3; ++step) {
    const auto [fetches, late] = memory.step(forward_and_backward(7));
    EXPECT_EQ(fetches, 7);
    EXPECT_EQ(late, step == 0 ? 7 : 1);  // then each is sent for before its use, but the first
  }
}

TEST(GatherOrder, WithoutRoomAllButTheLastsAreFetchedTwice) {
  Memory memory(std::vector<std::int64_t>(7, 10), 0);  // one in use and one on its way
  memory.step(forward_and_backward(7));
  for (int step = 0; step < 3; ++step) {
    const auto [fetches, late] = memory.step(forward_and_backward(7));
    EXPECT_EQ(fetches, 12);
    EXPECT_EQ(late, 1);
  }
}

TEST(GatherOrder, FetchesAreTheFewestOfAllSchedules) {
  std::mt19937 random(5);
  for (int round = 0; round < 400; ++round) {
    const std::size_t buckets = 2 + random() % 5;
    std::vector<Use> uses;
    for (std::size_t i = 0; i < 4 + random() % 9; ++i) {
      const std::size_t bucket = random() % buckets;
      if (uses.empty() || uses.back().bucket != bucket) uses.push_back({bucket, Phase::kForward});
    }
    const int room = 2 + static_cast<int>(random() % buckets);
    Memory memory(std::vector<std::int64_t>(buckets, 10), 10 * room);
    memory.step(uses);
    const auto [fetches, late] = memory.step(uses);
    EXPECT_EQ(fetches, fewest(uses, buckets, room)) << round;
    EXPECT_LE(late, fetches);
  }
}

TEST(GatherOrder, AnotherPassBetweenStepsFindsItsWayBack) {
  Memory memory(std::vector<std::int64_t>(5, 10), 20);
  std::vector<Use> uses = forward_and_backward(5);
  memory.step(uses);
  const int usual = memory.step(uses).first;
  std::vector<Use> with_evaluation(uses.begin(), uses.begin() + 5);
  with_evaluation.insert(with_evaluation.end(), uses.begin(), uses.end());
  EXPECT_LE(memory.step(with_evaluation).first, usual + 5);
  memory.step(uses);
  EXPECT_EQ(memory.step(uses).first, usual);
}

// A server: passes without a step, of which no end is told. A bucket that is used first and last (tied) too.
TEST(GatherOrder, PassesOfAnEvaluationAreExpectedFromTheSecondOn) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const std::size_t buckets = 3 + random() % 5;
    std::vector<Use> pass;
    for (std::size_t i = 0; i < buckets; ++i) pass.push_back({i, Phase::kEvaluation});
    if (random() % 2) pass.push_back({0, Phase::kEvaluation});
    const auto room = static_cast<std::int64_t>(2 + random() % buckets);
    Memory memory(std::vector<std::int64_t>(buckets, 10), 10 * room);
    memory.pass(pass);
    memory.pass(pass);
    for (int more = 0; more < 3; ++more) {
      const auto [fetches, late] = memory.pass(pass);
      EXPECT_EQ(late, 0) << round;  // the first, too, is sent for by the pass before
      if (room >= static_cast<std::int64_t>(buckets)) {
        EXPECT_EQ(fetches, 0) << round;
      }
    }
  }
}

// Evaluations come and go between steps: a step fetches what it would without them, or less and later, where
// what they leave is kept for it.
TEST(GatherOrder, AStepIsExpectedWhateverIsEvaluatedBeforeIt) {
  for (int room = 2; room < 7; ++room) {
    Memory memory(std::vector<std::int64_t>(6, 10), 10 * room);
    const std::vector<Use> step = forward_and_backward(6);
    memory.step(step);
    const auto usual = memory.step(step);
    for (int round = 0; round < 3; ++round) {
      for (int pass = 0; pass < round; ++pass) {
        std::vector<Use> uses;
        for (std::size_t i = 0; i < 6; ++i) uses.push_back({i, Phase::kEvaluation});
        memory.pass(uses);
      }
      const auto [fetches, late] = memory.step(step);
      EXPECT_LE(fetches, usual.first) << room;
      EXPECT_TRUE(late <= 1 || fetches < usual.first) << room;
    }
  }
}

TEST(GatherOrder, SizesAreBytes) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::int64_t> bytes;
    for (std::size_t i = 0; i < 2 + random() % 6; ++i) bytes.push_back(1 + random() % 1000);
    Memory memory(bytes, random() % 3000);
    for (int step = 0; step < 3; ++step) memory.step(forward_and_backward(bytes.size()));
    std::vector<Use> others;
    for (int i = 0; i < 20; ++i)
      others.push_back({random() % bytes.size(), random() % 2 ? Phase::kForward : Phase::kBackward});
    memory.step(others);
    memory.step(forward_and_backward(bytes.size()));
  }
}

}  // namespace
}  // namespace reef
