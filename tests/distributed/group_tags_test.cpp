// Numbers by which exchanges in one group are told apart, seen from shards, each of which takes three. Run as
// several ranks by tests/support/ranks.py.
#include <optional>

#include "messages.h"
#include "reef/shard.h"
#include "reef/subgroup.h"

namespace reef {
namespace {

using messages::config_error;
using messages::expect_words;
using messages::rank;
using messages::size;
using messages::world;

constexpr std::size_t kMost = 511;

/// Sums up what all ranks give it, so that a message of another shard would be seen.
struct Sharded {
  explicit Sharded(const ProcessGroupPtr& group)
      : shard(reef::shard(*layer, group, {.stage = Stage::kReplicate, .reduction = Reduction::kSum})) {}
  void expect_right(const ProcessGroupPtr& group, double own) {
    layer->zero_grad();
    (layer->weight * (own + group->getRank())).sum().backward();
    const int count = group->getSize();
    EXPECT_EQ(layer->weight.grad().item<double>(), own * count + count * (count - 1) / 2.0);
  }

  torch::nn::Linear layer{torch::nn::LinearOptions(1, 1).bias(false)};
  Shard shard;
};

TEST(GroupTags, AreGivenBackAndOfEachGroup) {
  if (size() > 2) GTEST_SKIP() << "each shard that is used has threads of its own";
  std::vector<std::optional<Sharded>> all;
  for (std::size_t i = 0; i < kMost; ++i) all.emplace_back(std::in_place, world());
  const auto one_more = [] { const Sharded more(world()); };
  expect_words(config_error(one_more), {"in use", "subgroup"});
  // Nothing of it stays taken by what was refused.
  all[7].reset();
  all[7].emplace(world());
  expect_words(config_error(one_more), {"in use"});
  if (size() == 2) {
    // What one rank still has is not the other's to use again.
    all[rank() == 0 ? 30 : 50].reset();
    expect_words(config_error(one_more), {"in use"});
    all[rank() == 0 ? 50 : 30].reset();
    all[30].emplace(world());
    all[50].emplace(world());
    expect_words(config_error(one_more), {"in use"});
    const auto other = subgroup(world(), {1, 0});
    Sharded beside(other);
    beside.expect_right(other, 5);
  }
  for (const std::size_t i : {std::size_t{0}, std::size_t{7}, std::size_t{30}, std::size_t{50}, kMost - 1})
    all[i]->expect_right(world(), static_cast<double>(i));
  all.clear();
  for (int i = 0; i < 3; ++i) one_more();
}

}  // namespace
}  // namespace reef
