#include "shard/nonfinite_gradients.h"

#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "kernels/count_nonfinite.h"
#include "reef/shard_layout.h"

namespace reef {
namespace {

using at::Tensor;

/// Counts, for each 256 elements, which are of one parameter, those that are not finite. Returns an undefined
/// tensor if it is known at once that there are none; does not wait for a device.
Tensor nonfinite_blocks(const Tensor& values) {
  const auto format = kernels::float_format(values);
  if (values.is_cpu() && format &&
      kernels::cpu::count_nonfinite(values.const_data_ptr(), values.numel(), *format) == 0)
    return {};
  return at::isfinite(values).logical_not_().view({values.numel() / kShardAlignment, kShardAlignment}).sum(1);
}

/// Adds numbers of blocks, the first of which begins at element `first` of the bucket, up by parameters.
void add_by_item(const Tensor& blocks, std::int64_t first, c10::ArrayRef<FlatPlace> places,
                 std::int64_t* counts) {
  if (!blocks.defined()) return;
  const Tensor on_host = blocks.cpu();
  const auto* const of_block = on_host.const_data_ptr<std::int64_t>();
  for (const FlatPlace& place : places) {
    const std::int64_t begin = place.offset - first;
    const std::int64_t end = begin + c10::multiply_integers(place.shape);
    const std::int64_t last = std::min((end + kShardAlignment - 1) / kShardAlignment, on_host.numel());
    for (std::int64_t block = std::max<std::int64_t>(begin / kShardAlignment, 0); block < last; ++block)
      counts[place.item] += of_block[block];
  }
}

}  // namespace

void NonFiniteSearch::exchange(GradientExchange& by, const GradientBucket& bucket) {
  Found& found = found_[bucket.number];
  found.places = bucket.places;
  found.in_own = found.in_result = Tensor();
  const bool has_all = bucket.own.numel() == bucket.flat.numel();
  const Tensor slice = has_all ? by.ranks().own_slice(bucket.own) : bucket.own;
  found.first = by.ranks().copy().place * slice.numel();
  using Where = GradientBucket::Where;
  const auto look = [&](Where where) {
    (where == Where::kFlat ? found.in_own : found.in_result) =
        nonfinite_blocks(where == Where::kFlat ? bucket.flat : slice);
  };
  if (by.finds_nonfinite(bucket)) {
    by.exchange({bucket.number, bucket.flat, bucket.own, bucket.places, look});
    return;
  }
  look(Where::kFlat);
  by.exchange(bucket);
  look(Where::kOwn);
}

Tensor NonFiniteSearch::found() const {
  std::vector<Tensor> flags;
  for (const Found& found : found_) {
    for (const Tensor* const blocks : {&found.in_own, &found.in_result})
      if (blocks->defined()) flags.push_back(blocks->any());
  }
  return flags.empty() ? Tensor() : at::stack(flags).any();
}

bool NonFiniteSearch::any() const {
  const Tensor flag = found();
  return flag.defined() && flag.item<bool>();
}

std::vector<NonFiniteElements> NonFiniteSearch::of_all_ranks(
    const std::vector<std::string>& names, const SliceExchange& ranks,
    const std::function<Tensor(const Tensor&)>& largest) const {
  const auto items = static_cast<std::int64_t>(names.size());
  const std::int64_t count = ranks.all().count;
  const Tensor own = at::zeros({2 * count * items}, at::kLong);
  auto* const of_rank = own.mutable_data_ptr<std::int64_t>() + 2 * ranks.all().place * items;
  for (const Found& found : found_) {
    add_by_item(found.in_own, /*first=*/0, found.places, of_rank);
    add_by_item(found.in_result, found.first, found.places, of_rank + items);
  }
  const Tensor all = largest(own);
  const auto* const counts = all.const_data_ptr<std::int64_t>();

  std::vector<NonFiniteElements> in_gradients, in_results;
  for (std::int64_t item = items - 1; item >= 0; --item) {
    const std::string& name = names[static_cast<std::size_t>(item)];
    std::int64_t arrived = 0;
    for (std::int64_t rank = 0; rank < count; ++rank) {
      const std::int64_t elements = counts[2 * rank * items + item];
      if (elements > 0) in_gradients.push_back({name, static_cast<int>(rank), elements});
      // Copies have the same slices.
      if (rank < ranks.copy().count) arrived += counts[(2 * rank + 1) * items + item];
    }
    if (arrived > 0) in_results.push_back({name, std::nullopt, arrived});
  }
  return in_gradients.empty() ? in_results : in_gradients;
}

}  // namespace reef
