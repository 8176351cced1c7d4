// Run as several ranks by tests/support/ranks.py.
#include "reef/subgroup.h"

#include <algorithm>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "messages.h"
#include "reef/collectives.h"
#include "reef/point_to_point.h"
#include "reef/shard.h"

namespace reef {
namespace {

using messages::config_error;
using messages::expect_words;
using messages::Held;
using messages::rank;
using messages::size;
using messages::world;
using Ranks = std::vector<std::int64_t>;

/// Every choice of members, in every order.
std::vector<Ranks> every_list(int ranks) {
  std::vector<Ranks> lists;
  Ranks all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  do {
    for (std::size_t count = 1; count <= all.size(); ++count) {
      Ranks list(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
      if (std::find(lists.begin(), lists.end(), list) == lists.end()) lists.push_back(list);
    }
  } while (std::next_permutation(all.begin(), all.end()));
  return lists;
}

/// What a group of these ranks of the world must be, on every rank of the world.
void expect_group(const ProcessGroupPtr& group, const Ranks& ranks) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  ASSERT_EQ(group != nullptr, own != ranks.end()) << c10::IntArrayRef(ranks);
  if (!group) return;
  const int count = static_cast<int>(ranks.size());
  ASSERT_EQ(group->getSize(), count);
  ASSERT_EQ(group->getRank(), own - ranks.begin()) << c10::IntArrayRef(ranks);
  const at::Tensor sum = at::full({3}, std::int64_t{1} << (4 * rank()));
  all_reduce({sum}, group);
  std::int64_t expected = 0;
  for (const auto each : ranks) expected += std::int64_t{1} << (4 * each);
  EXPECT_TRUE(at::equal(sum, at::full({3}, expected))) << c10::IntArrayRef(ranks);
  for (int root = 0; root < count; ++root) {
    const at::Tensor from_root = at::full({2}, rank());
    broadcast({from_root}, group, root);
    EXPECT_TRUE(at::equal(from_root, at::full({2}, ranks[static_cast<std::size_t>(root)])));
  }
  if (count == 1) return;
  // To the next, in the order of the list.
  const int next = (group->getRank() + 1) % count;
  const int before = (group->getRank() + count - 1) % count;
  const auto sent = isend(at::full({2}, rank()), next, group);
  EXPECT_TRUE(at::equal(receive(before, group), at::full({2}, ranks[static_cast<std::size_t>(before)])));
  sent.wait();
}

TEST(Subgroup, EveryListIsAGroupInItsOrder) {
  for (const Ranks& list : every_list(size())) expect_group(subgroup(world(), list), list);
}

TEST(Subgroup, OfASubgroupOfASubgroup) {
  Ranks backwards(static_cast<std::size_t>(size()));
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  const auto outer = subgroup(world(), backwards);
  expect_group(outer, backwards);
  for (const Ranks& inner : every_list(std::min(size(), 3))) {  // ranks of `outer`
    Ranks in_world;
    for (const auto each : inner) in_world.push_back(size() - 1 - each);
    const auto group = subgroup(outer, inner);
    expect_group(group, in_world);
    if (!group) continue;
    Ranks turned(inner.size());
    std::iota(turned.rbegin(), turned.rend(), 0);
    std::reverse(in_world.begin(), in_world.end());
    expect_group(subgroup(group, turned), in_world);
  }
}

TEST(Subgroup, GroupsBesideEachOtherDoNotMeet) {
  // Disjoint groups are made by calls that all ranks make, and inside them at the same time.
  const Ranks even_half = [] {
    Ranks list;
    for (int each = 0; each < size(); each += 2) list.push_back(each);
    return list;
  }();
  Ranks odd_half;
  for (int each = 1; each < size(); each += 2) odd_half.push_back(each);
  const auto even = subgroup(world(), even_half);
  const auto odd = odd_half.empty() ? ProcessGroupPtr() : subgroup(world(), odd_half);
  expect_group(even, even_half);
  expect_group(odd, odd_half);
  const auto own = even ? even : odd;
  const Ranks& list = even ? even_half : odd_half;
  for (int round = 0; round < 5; ++round) {
    Ranks all(list.size());
    std::iota(all.begin(), all.end(), 0);
    expect_group(subgroup(own, all), list);
  }
}

TEST(Subgroup, WrongListsAreRefusedOnEveryRank) {
  const std::vector<std::pair<Ranks, std::string>> rows = {
      {{}, "no ranks"},
      {{0, 0}, "rank 0 stands twice"},
      {{-1}, "no rank -1"},
      {{size()}, "no rank " + std::to_string(size())},
      {{0, std::int64_t{1} << 40}, "no rank 1099511627776"},
  };
  for (const auto& [list, words] : rows) {
    expect_words(config_error([&, &wrong = list] { subgroup(world(), wrong); }), {words, "reef::subgroup"});
  }
  expect_words(config_error([] { subgroup({}, Ranks{0}); }), {"init_process_group"});
  expect_group(subgroup(world(), Ranks{0}), {0});
}

TEST(Subgroup, ListsThatDifferAreRefusedOnEveryRank) {
  if (size() == 1) GTEST_SKIP();
  const std::vector<std::pair<Ranks, Ranks>> rows = {{{0, 1}, {1, 0}}, {{0}, {1}},          {{0, 1}, {0}},
                                                     {{0, 1}, {}},     {{0, 1}, {0, 1, 7}}, {{7}, {0, 1}}};
  for (const auto& [first, last] : rows) {
    for (int odd_one = 0; odd_one < size(); ++odd_one) {
      const Ranks& own = rank() == odd_one ? last : first;
      const auto text = config_error([&] { subgroup(world(), own); });
      std::ostringstream a, b;
      a << c10::IntArrayRef(first);
      b << c10::IntArrayRef(last);
      expect_words(text, {a.str(), b.str(), "same list"});
    }
  }
  expect_group(subgroup(world(), Ranks{1, 0}), {1, 0});
}

TEST(Subgroup, AnotherCallIsToldToWhoMakesItToo) {
  if (size() == 1) GTEST_SKIP();
  torch::nn::Linear layer(2, 2);
  for (int odd_one = 0; odd_one < size(); ++odd_one) {
    const auto text = config_error([&] {
      if (rank() == odd_one) {
        shard(*layer, world());
      } else {
        subgroup(world(), Ranks{0});
      }
    });
    expect_words(text, {"reef::subgroup"});
  }
  expect_group(subgroup(world(), Ranks{0, 1}), {0, 1});
}

TEST(Subgroup, HundredsLeaveNothing) {
  Ranks all(static_cast<std::size_t>(size()));
  std::iota(all.rbegin(), all.rend(), 0);
  expect_group(subgroup(world(), all), all);  // whatever is made once
  barrier(world());
  const Held before;
  const auto keys = world()->getStore()->getNumKeys();
  barrier(world());
  for (int round = 0; round < 300; ++round) {
    const auto group = subgroup(world(), all);
    const at::Tensor one = at::ones({1});
    all_reduce({one}, group);
    ASSERT_EQ(one.item<float>(), static_cast<float>(size()));
  }
  {
    std::vector<ProcessGroupPtr> at_once;
    for (int i = 0; i < 100; ++i) at_once.push_back(subgroup(world(), all));
    for (std::size_t i = 0; i < at_once.size(); i += 7) expect_group(at_once[i], all);
    // Each rank lets go of them in an order of its own.
    if (rank() % 2 == 0) std::reverse(at_once.begin(), at_once.end());
    barrier(world());
    while (!at_once.empty()) at_once.pop_back();
  }
  EXPECT_TRUE(Held::becomes_at_most(before));
  barrier(world());
  // Signs of life come once for each rank.
  EXPECT_LE(world()->getStore()->getNumKeys(), keys + size());
  barrier(world());
}

TEST(Subgroup, OutlivesTheGroupItIsOf) {
  Ranks all(static_cast<std::size_t>(size()));
  std::iota(all.begin(), all.end(), 0);
  auto outer = subgroup(world(), all);
  auto inner = subgroup(outer, all);
  outer.reset();
  expect_group(inner, all);
  const auto innermost = subgroup(inner, all);
  inner.reset();
  expect_group(innermost, all);
}

TEST(Subgroup, OfAGroupMadeByC10dsOwnMeans) {
  if (size() == 1) GTEST_SKIP();
  auto plain = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>("by_hand", world()->getStore()), rank(), size());
  plain->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, world()->getBackend(c10::kCPU));
  plain->setDefaultBackend(c10d::ProcessGroup::GLOO);
  for (const Ranks& list : every_list(std::min(size(), 3))) expect_group(subgroup(plain, list), list);
  expect_words(config_error([&] { subgroup(plain, Ranks{0, 0}); }), {"stands twice"});
}

TEST(Subgroup, WhereMembersCannotMeetIsRefused) {
  if (size() == 1) GTEST_SKIP();
  auto without_store = c10::make_intrusive<c10d::ProcessGroup>(nullptr, rank(), size());
  without_store->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, world()->getBackend(c10::kCPU));
  without_store->setDefaultBackend(c10d::ProcessGroup::GLOO);
  expect_words(config_error([&] { subgroup(without_store, Ranks{0}); }), {"without a store"});
}

}  // namespace
}  // namespace reef
