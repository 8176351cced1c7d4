// Ranks that use buckets in orders of their own, each of which needs all ranks to gather it: programs at
// random, in which a gather is a number in the group's store that each rank adds to.
#include "shard/asked_gathers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "messages.h"

namespace reef {
namespace {

using messages::rank;
using messages::size;
using messages::world;

constexpr std::size_t kBuckets = 5;
constexpr int kUses = 30;

c10d::Store& store() { return *world()->getStore(); }
void look_again() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

/// On which ranks meet; what they do meanwhile is `meanwhile`.
template <class Meanwhile>
void meet(const std::string& where, const Meanwhile& meanwhile) {
  for (store().add(where, 1); store().add(where, 0) < size(); look_again()) meanwhile();
}

/// This rank's buckets, without memory.
class Imitated final : public AskedGathers::Buckets, public CommLane {
 public:
  explicit Imitated(int program) : prefix_("imitated/" + std::to_string(program) + '/') {}

  void begin(std::size_t bucket) {
    ++begun[bucket];
    gathers_.emplace_back(key(bucket));
    store().add(gathers_.back(), 1);
    asked->begun(bucket);
  }
  void use(std::size_t bucket) {
    asked->used(bucket);
    if (!here[bucket]) fetch(bucket);
    wait_here(bucket);
  }
  void look_ahead(std::size_t bucket) {
    if (!here[bucket]) fetch(bucket);
  }
  // Until all have begun it.
  void wait_here(std::size_t bucket) {
    if (!coming[bucket]) return;
    asked->await(*this, ticket[bucket]);
    coming[bucket] = false;
  }
  void drop(std::size_t bucket) {
    wait_here(bucket);
    here[bucket] = false;
  }

  bool is_coming(std::size_t bucket) const override { return coming[bucket]; }
  bool gather_for_others(std::size_t bucket) override {
    if (here[bucket]) return false;
    fetch(bucket);
    ++kept;
    return true;
  }
  void take_part(std::size_t bucket) override { begin(bucket); }

  std::uint64_t submit(std::function<void()>, c10::ArrayRef<at::Tensor>) override { return 0; }
  void wait(std::uint64_t number) override {
    while (!wait_for(number, std::chrono::milliseconds(1000))) {
    }
  }
  bool wait_for(std::uint64_t number, std::chrono::milliseconds most) override {
    const auto until = std::chrono::steady_clock::now() + most;
    for (; store().add(gathers_[number], 0) < size(); look_again()) {
      if (std::chrono::steady_clock::now() > until) return false;
    }
    return true;
  }
  void wait_on_host(std::uint64_t number) override { wait(number); }
  void drain() noexcept override {}

  AskedGathers* asked = nullptr;
  std::vector<std::int64_t> begun = std::vector<std::int64_t>(kBuckets, 0);
  std::vector<bool> here = std::vector<bool>(kBuckets, false);    // or coming
  std::vector<bool> coming = std::vector<bool>(kBuckets, false);  // of these
  std::vector<std::uint64_t> ticket = std::vector<std::uint64_t>(kBuckets, 0);
  int kept = 0;  // for others

 private:
  std::string key(std::size_t bucket) const {
    return prefix_ + std::to_string(bucket) + '/' + std::to_string(begun[bucket]);
  }
  void fetch(std::size_t bucket) {
    here[bucket] = coming[bucket] = true;
    ticket[bucket] = gathers_.size();
    begin(bucket);
  }

  std::string prefix_;
  std::vector<std::string> gathers_;
};

// Whatever order each rank has, whatever it begins ahead, and if one gives up: nobody waits for ever, and all
// have begun the same.
TEST(AskedGathers, RanksThatUseOtherBucketsWaitForNobody) {
  constexpr int kPrograms = 4;
  for (int program = 0; program < kPrograms; ++program) {
    SCOPED_TRACE(program);
    const std::string name = "asked_gathers_test/" + std::to_string(program);
    std::mt19937_64 random(static_cast<std::uint64_t>(program * 100 + rank()));
    Imitated own(program);
    AskedGathers asked(own, kBuckets);
    own.asked = &asked;
    asked.open(world(), name, size());
    ASSERT_EQ(asked.is_open(), size() > 1);
    asked.begin_step(program + 1);
    meet(name + "/begin", [] {});

    const bool fails = program % 3 == 2 && program % size() == rank();
    const int uses = fails ? kUses / 2 : kUses - static_cast<int>(random() % 10);
    for (int use = 0; use < uses; ++use) {
      const std::size_t bucket = random() % kBuckets;
      own.use(bucket);
      ASSERT_FALSE(asked.is_for_others(bucket));
      for (std::size_t each = 0; each < kBuckets; ++each) {
        if (asked.is_for_others(each)) continue;
        if (random() % 2 == 0) own.drop(each);  // may wait, and answer meanwhile
        if (each != bucket && random() % 4 == 0) own.look_ahead(each);
      }
      std::size_t for_others = 0;
      for (std::size_t each = 0; each < kBuckets; ++each) {
        if (!asked.is_for_others(each)) continue;
        ++for_others;
        ASSERT_TRUE(own.here[each]);
      }
      ASSERT_LE(for_others, 2U);
    }
    if (fails) asked.tell_failed();
    const int kept_before = own.kept;
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) own.wait_here(bucket);
    asked.end(std::chrono::minutes(5));
    if (fails) {
      EXPECT_EQ(own.kept, kept_before);
    }
    EXPECT_EQ(asked.is_open(), size() > 1);

    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket)
      store().add(name + "/all/" + std::to_string(bucket), own.begun[bucket]);
    meet(name + "/counted", [] {});
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket)
      EXPECT_EQ(store().add(name + "/all/" + std::to_string(bucket), 0), size() * own.begun[bucket]);
    meet(name + "/over", [] {});
  }
}

// Ranks come out of an exchange at other times: one that is still in it hears what those ask for who are past
// it, and must not begin that beside what all begin.
TEST(AskedGathers, AllBeginAlikeWhereAllGather) {
  constexpr int kRounds = 12;
  Imitated own(1000);
  AskedGathers asked(own, kBuckets);
  own.asked = &asked;
  asked.open(world(), "asked_gathers_test/alike", size());
  asked.begin_step(1);
  const auto drop_all = [&] {
    asked.forget();
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) own.drop(bucket);
  };
  for (int round = 0; round < kRounds; ++round) {
    const std::string name = "asked_gathers_test/alike/" + std::to_string(round);
    std::mt19937_64 random(static_cast<std::uint64_t>(round * 100 + rank()));
    for (int use = 0; use < 5; ++use) own.use(random() % kBuckets);
    if (round % size() == rank()) asked.tell_failed();  // so that the others ask at once
    drop_all();
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      const std::string most = name + "/begun/" + std::to_string(bucket) + '/' + std::to_string(rank());
      store().set(most, std::to_string(own.begun[bucket]));
    }
    meet(name + "/even", [&] { asked.answer(); });
    for (int late = rank() == (round + 1) % size() ? 300 : 0; late > 0; --late, look_again()) asked.answer();
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      std::int64_t most = 0;
      for (int of = 0; of < size(); ++of) {
        const std::string key = name + "/begun/" + std::to_string(bucket) + '/' + std::to_string(of);
        most = std::max<std::int64_t>(most, std::stoll(store().get_to_str({key})));
      }
      while (own.begun[bucket] < most) own.take_part(bucket);
    }
    drop_all();
    asked.begin_part();
    asked.abandon_pass();
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) {
      if (!own.here[bucket]) own.gather_for_others(bucket);
    }
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) own.wait_here(bucket);
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket)
      store().add(name + "/all/" + std::to_string(bucket), own.begun[bucket]);
    meet(name + "/counted", [&] { asked.answer(); });
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket)
      EXPECT_EQ(store().add(name + "/all/" + std::to_string(bucket), 0), size() * own.begun[bucket]) << round;
    drop_all();
  }
}

}  // namespace
}  // namespace reef
