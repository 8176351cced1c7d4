#include "shard/power_sgd_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "factor_rank.h"
#include "kernels/low_rank.h"
#include "kernels/random_key.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kBeyond = "residual";
constexpr const char* kFactors[] = {"left", "right"};
constexpr const char* kExchange = "the exchange of low-rank factors";

MatrixSizes sizes_of(at::IntArrayRef shape) { return matrix_sizes({shape.data(), shape.size()}); }

// Of the highest rank that a matrix has in any step.
std::int64_t highest_rank(const StepSchedule& schedule, MatrixSizes sizes) {
  std::int64_t highest = schedule.has_value() ? 0 : factor_rank(sizes, kFactorRank);
  for (const auto& [step, rank] : schedule.entries())
    highest = std::max(highest, factor_rank(sizes, static_cast<std::int64_t>(rank)));
  return highest;
}

void make_orthonormal(const Tensor& rows) {
  kernels::orthonormalize(rows.mutable_data_ptr<float>(), rows.size(0), rows.size(1));
}

}  // namespace

ExchangeMemory PowerSgdExchange::memory_of_factors(const ProcessGroupPtr& group, int slices,
                                                   const ShardOptions& options) {
  using Remembered = RememberedTensor;
  const auto factor = [schedule = options.compression_options.rank](bool left) {
    return [schedule, left](at::IntArrayRef shape) -> std::vector<std::int64_t> {
      const MatrixSizes sizes = sizes_of(shape);
      const std::int64_t rank = highest_rank(schedule, sizes);
      if (rank == 0) return {};
      return {rank, left ? sizes.rows : sizes.columns};
    };
  };
  using Ranks = Remembered::Ranks;
  using Extent = Remembered::Extent;
  return {name_of(options.compression),
          {{kBeyond, Ranks::kShares, extent_of_residual(group, slices, options)},
           {kFactors[0], Ranks::kAlike, Extent::kFactor, factor(true)},
           {kFactors[1], Ranks::kAlike, Extent::kFactor, factor(false)}},
          {kSteps}};
}

PowerSgdExchange::PowerSgdExchange(const ProcessGroupPtr& group, int number, int slices,
                                   const ShardOptions& options, bool alternating)
    : LossyExchange(group, number, slices, options, memory_of_factors(group, slices, options)),
      rank_(options.compression_options.rank),
      seed_(static_cast<std::uint64_t>(options.compression_options.seed.at(0, 0))),
      alternating_(alternating) {}

int PowerSgdExchange::rank_in_step() const { return static_cast<int>(rank_.at(used_steps(), kFactorRank)); }

void PowerSgdExchange::exchange(const GradientBucket& bucket) {
  if (ranks().all().count == 1 || !is_float_on_cpu(bucket.flat)) return add_up_as_it_is(bucket);
  const Tensor all = all_with_residual(bucket);
  const Tensor rest = at::zeros_like(all);
  std::vector<Item> items = items_of(bucket, all, rest);

  std::vector<Tensor> sums;
  for (Item& item : items) {
    if (item.rank == 0) {
      sums.push_back(item.values);
      continue;
    }
    const Side side = side_to_find(bucket, item);
    const Tensor known = known_factor(bucket, item, side == Side::kLeft ? Side::kRight : Side::kLeft);
    (side == Side::kLeft ? item.right : item.left) = known;
    (side == Side::kLeft ? item.left : item.right) =
        at::mm(known, side == Side::kLeft ? item.matrix.t() : item.matrix);
    sums.push_back(side == Side::kLeft ? item.left : item.right);
  }
  add_up_over_ranks(sums);
  if (!alternating_) {
    sums.clear();
    for (Item& item : items) {
      if (item.rank == 0) continue;
      make_orthonormal(item.left);
      item.right = at::mm(item.left, item.matrix);
      sums.push_back(item.right);
    }
    add_up_over_ranks(sums);
  }
  for (const Item& item : items) {
    if (item.rank == 0) continue;
    const Side found = alternating_ ? side_to_find(bucket, item) : Side::kRight;
    kernels::take_low_rank(item.matrix.mutable_data_ptr<float>(),
                           item.rest_of_matrix.mutable_data_ptr<float>(), item.left.const_data_ptr<float>(),
                           item.right.const_data_ptr<float>(), item.matrix.size(0), item.matrix.size(1),
                           item.rank, between().count);
    if (!item.matrix.is_alias_of(item.values)) {
      item.values.copy_(item.matrix.view(item.values.sizes()));
      item.rest.copy_(item.rest_of_matrix.view(item.rest.sizes()));
    }
    remember_factor(bucket, item, found);
  }
  memory().remember(bucket.number, kBeyond, has_copies() ? ranks().own_slice(rest).clone() : rest);
  if (divided()) {
    const Tensor own = ranks().own_slice(all);
    if (own.const_data_ptr() != bucket.own.const_data_ptr()) bucket.own.copy_(own);
  }
  if (reduction() == Reduction::kMean) bucket.own.div_(ranks().all().count);
}

// All of the bucket's gradient, or its copy's, and what was held back.
Tensor PowerSgdExchange::all_with_residual(const GradientBucket& bucket) {
  const Tensor before = memory().tensor(bucket.number, kBeyond);
  if (!has_copies()) {
    if (before.defined()) bucket.flat.add_(before);
    return bucket.flat;
  }
  const Tensor own = ranks().own_slice(bucket.flat);
  sum_.reduce_scatter(bucket.flat, own, SliceSum::Over::kCopy, Reduction::kSum);
  if (before.defined()) own.add_(before);
  ranks().all_gather(kExchange, bucket.flat, ranks().copy());
  return bucket.flat;
}

std::vector<PowerSgdExchange::Item> PowerSgdExchange::items_of(const GradientBucket& bucket,
                                                               const Tensor& all, const Tensor& rest) {
  std::vector<Item> items;
  for (const GradientBucket::Place& place : bucket.places) {
    Item item{place.offset, place.of(all), place.of(rest), {}, {}, 0, {}, {}};
    const MatrixSizes sizes = sizes_of(place.shape);
    item.rank = factor_rank(sizes, rank_in_step());
    if (item.rank > 0) {
      item.matrix = item.values.reshape({sizes.rows, sizes.columns}).contiguous();
      item.rest_of_matrix = item.matrix.is_alias_of(item.values) ? item.rest.view({sizes.rows, sizes.columns})
                                                                 : at::empty_like(item.matrix);
    }
    items.push_back(std::move(item));
  }
  return items;
}

// By chance, the same on all ranks and machines: from -1 to 1.
Tensor PowerSgdExchange::first_factor(const GradientBucket& bucket, std::int64_t first, std::int64_t rank,
                                      std::int64_t length) const {
  Tensor factor = at::empty({rank, length}, bucket.flat.options());
  auto* const values = factor.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < factor.numel(); ++i) {
    const std::uint64_t random = kernels::random_key(
        {seed_, bucket.number, static_cast<std::uint64_t>(first), static_cast<std::uint64_t>(i)});
    values[i] = static_cast<float>(random >> 40U) * 0x1p-23F - 1;
  }
  make_orthonormal(factor);
  return factor;
}

Tensor PowerSgdExchange::known_factor(const GradientBucket& bucket, const Item& item, Side side) const {
  const Tensor found = memory().tensor(bucket.number, kFactors[static_cast<int>(side)], item.first);
  if (found.defined()) return found.narrow(0, 0, item.rank);
  return first_factor(bucket, item.first, item.rank, item.matrix.size(side == Side::kLeft ? 0 : 1));
}

// The one whose other is known; of neither, the left.
PowerSgdExchange::Side PowerSgdExchange::side_to_find(const GradientBucket& bucket, const Item& item) const {
  const Tensor left = memory().tensor(bucket.number, kFactors[0], item.first);
  return left.defined() ? Side::kRight : Side::kLeft;
}

// Orthonormal: the next step's numbers stay in the range of its gradient's. What has nothing to go on from
// (a gradient of zeros, or not of numbers) begins anew.
void PowerSgdExchange::remember_factor(const GradientBucket& bucket, const Item& item, Side side) {
  const Tensor factor = (side == Side::kLeft ? item.left : item.right).clone();
  make_orthonormal(factor);
  const std::int64_t length = factor.size(1);
  Tensor first;
  for (std::int64_t k = 0; k < factor.size(0); ++k) {
    const auto sum = factor[k].abs().sum().item<float>();
    if (sum > 0) continue;  // and not NaN
    if (!first.defined()) first = first_factor(bucket, item.first, factor.size(0), length);
    factor[k].copy_(first[k]);
  }
  if (first.defined()) make_orthonormal(factor);
  const std::int64_t highest = highest_rank(rank_, {item.matrix.size(0), item.matrix.size(1)});
  const char* const name = kFactors[static_cast<int>(side)];
  Tensor kept = factor;
  if (highest > factor.size(0)) {
    const Tensor before = memory().tensor(bucket.number, name, item.first);
    kept = before.defined() ? before.clone() : first_factor(bucket, item.first, highest, length);
    kept.narrow(0, 0, factor.size(0)).copy_(factor);
  }
  memory().remember(bucket.number, name, kept, item.first);
  if (alternating_) {
    const Side other = side == Side::kLeft ? Side::kRight : Side::kLeft;
    memory().remember(bucket.number, kFactors[static_cast<int>(other)], Tensor(), item.first);
  }
}

// Over ranks, or copies, in their order: an all-reduce, of which a rank of a copy does a part.
void PowerSgdExchange::add_up_over_ranks(const std::vector<Tensor>& values) {
  const RanksAmong among = between();
  const RanksAmong within = has_copies() ? ranks().copy() : RanksAmong{};
  std::int64_t elements = 0;
  for (const Tensor& each : values) elements += each.numel();
  if (elements == 0) return;
  const std::int64_t parts = std::int64_t{among.count} * within.count;
  const Tensor all =
      at::zeros({(elements + parts - 1) / parts * parts}, at::TensorOptions().dtype(at::kFloat));
  std::int64_t begin = 0;
  for (const Tensor& each : values) {
    all.narrow(0, begin, each.numel()).view(each.sizes()).copy_(each);
    begin += each.numel();
  }
  const Tensor part = SliceExchange::slice(all, within.place, within.count);
  const Tensor received = at::empty_like(part);
  ranks().all_to_all(kExchange, part, received, among);
  const Tensor sum = SliceExchange::slice(part, among.place, among.count);
  sum.copy_(SliceExchange::slice(received, 0, among.count));
  for (int number = 1; number < among.count; ++number)
    sum.add_(SliceExchange::slice(received, number, among.count));
  ranks().all_gather(kExchange, part, among);
  if (within.count > 1) ranks().all_gather(kExchange, all, within);
  begin = 0;
  for (const Tensor& each : values) {
    each.copy_(all.narrow(0, begin, each.numel()).view(each.sizes()));
    begin += each.numel();
  }
}

}  // namespace reef
