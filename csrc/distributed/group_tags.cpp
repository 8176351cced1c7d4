#include "distributed/group_tags.h"

#include <ATen/ops/zeros.h>

#include <limits>
#include <string>
#include <vector>

#include "distributed/bytes_over_ranks.h"
#include "reef/error.h"

namespace reef {
namespace {

static_assert(std::int64_t{TagSpace::kExchanges} + std::int64_t{TagSpace::kNumbers} * TagSpace::kPerNumber <
              std::numeric_limits<int>::max() - TagSpace::kPerNumber);

}  // namespace

GroupTags GroupTags::take(const ProcessGroupPtr& group, int count, c10::Device device) {
  GroupTags tags;
  tags.use_ = GroupUse::of(group);
  const at::Tensor own = at::zeros({TagSpace::kNumbers}, at::kByte);
  {
    const std::lock_guard lock(tags.use_->mutex);
    auto* const taken = own.mutable_data_ptr<std::uint8_t>();
    for (std::size_t number = 0; number < TagSpace::kNumbers; ++number)
      taken[number] = tags.use_->numbers.test(number) ? 1 : 0;
  }
  const std::vector<at::Tensor> all = gather_bytes(own, group, device);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].numel() == TagSpace::kNumbers) continue;
    throw ConfigError("rank " + std::to_string(rank) + " has called something else than rank " +
                      std::to_string(group->getRank()) +
                      ", which takes numbers for a shard: all ranks of a group "
                      "call the same in the same order.");
  }
  const auto is_free = [&](int number) {
    for (const at::Tensor& taken : all)
      if (taken.const_data_ptr<std::uint8_t>()[number] != 0) return false;
    return true;
  };
  int free = 0;  // before `number`, without a gap
  for (int number = TagSpace::kFirstFree; number < TagSpace::kNumbers; ++number) {
    free = is_free(number) ? free + 1 : 0;
    if (free < count) continue;
    tags.first_ = number + 1 - count;
    tags.count_ = count;
    const std::lock_guard lock(tags.use_->mutex);
    for (int taken = tags.first_; taken <= number; ++taken)
      tags.use_->numbers.set(static_cast<std::size_t>(taken));
    return tags;
  }
  throw ConfigError(
      "all numbers by which the exchanges of a group are told apart are in use, " +
      std::to_string(TagSpace::kNumbers - TagSpace::kFirstFree) +
      " of them: shard larger modules, end some, or shard others over a subgroup (reef::subgroup).");
}

GroupTags::~GroupTags() {
  if (!use_) return;
  const std::lock_guard lock(use_->mutex);
  for (int number = first_; number < first_ + count_; ++number)
    use_->numbers.reset(static_cast<std::size_t>(number));
}

}  // namespace reef
