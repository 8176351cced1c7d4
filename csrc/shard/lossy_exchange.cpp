#include "shard/lossy_exchange.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "ledger/allocation_gate.h"
#include "page/huge_pages.h"

namespace reef {
namespace {

using at::Tensor;

// Says whether the tensor may be kept and overwritten: nothing else, such as a state dict, refers to it.
// Within a budget all memory must be able to leave, and on a device LibTorch caches what is freed, so there
// it is not kept.
bool is_free(const Tensor& room) {
  return room.defined() && room.is_cpu() && room.use_count() == 1 && room.storage().use_count() == 1 &&
         !gate_gives_memory();
}

}  // namespace

void LossyExchange::begin_step(std::int64_t step) {
  GradientExchange::begin_step(step);
  sum_.forget();
}

void LossyExchange::end_step(bool used) {
  const std::vector<std::string>& numbers = memory().numbers();
  const bool counts = std::find(numbers.begin(), numbers.end(), kSteps) != numbers.end();
  if (used && counts) memory().remember(kSteps, used_steps() + 1);
  for (auto& [place, room] : rooms_) room = used ? memory().tensor(place.first, place.second) : Tensor();
  GradientExchange::end_step(used);
  for (auto& [place, room] : rooms_) {
    if (!is_free(room)) room.reset();
  }
}

Tensor LossyExchange::room(std::size_t bucket, const char* name, const Tensor& values) {
  Tensor room = std::exchange(rooms_[{bucket, name}], Tensor());
  const bool fits = is_free(room) && room.sizes() == values.sizes() && room.dtype() == values.dtype();
  return fits ? room : on_huge_pages(at::empty_like(values));
}

RememberedTensor::Extent LossyExchange::extent_of_residual(const ProcessGroupPtr& group, int slices,
                                                           const ShardOptions& options) {
  const bool has_copies = options.stage != Stage::kReplicate && slices < group->getSize();
  return has_copies ? RememberedTensor::Extent::kSlice : RememberedTensor::Extent::kBucket;
}

void LossyExchange::take(std::size_t bucket, const char* name, const Tensor& values) {
  const Tensor before = memory().tensor(bucket, name);
  if (!before.defined()) return;
  values.add_(before);
  memory().remember(bucket, name, Tensor());
}

void LossyExchange::clear_between_parameters(const GradientBucket& bucket, std::int64_t first,
                                             const Tensor& values) {
  const std::int64_t last = first + values.numel();
  std::int64_t begin = first;
  const auto clear_until = [&](std::int64_t end) {
    end = std::min(end, last);
    if (begin < end) values.narrow(0, begin - first, end - begin).zero_();
  };
  for (const GradientBucket::Place& place : bucket.places) {
    clear_until(place.offset);
    begin = std::max(begin, place.offset + c10::multiply_integers(place.shape));
  }
  clear_until(last);
}

// What was held back is a part of what each rank adds, once among all.
void LossyExchange::add_up_as_it_is(const GradientBucket& bucket) {
  for (const RememberedTensor& what : memory().tensors()) {
    if (what.ranks != RememberedTensor::Ranks::kShares) continue;
    const bool is_slice = what.extent == RememberedTensor::Extent::kSlice;
    take(bucket.number, what.name.c_str(), is_slice ? ranks().own_slice(bucket.flat) : bucket.flat);
  }
  if (divided()) {
    sum_.reduce_scatter(bucket.flat, bucket.own, SliceSum::Over::kAll, reduction());
  } else {
    sum_.all_reduce(bucket.flat, reduction());
  }
}

}  // namespace reef
