#include "shard/one_bit_adam_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "kernels/packed_levels.h"
#include "shard/packed_code.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kMomentum = "momentum";  // after the warm-up
constexpr const char* kMomentumOfSlice = "momentum_of_slice";
constexpr const char* kWorkerError = "residual";
constexpr const char* kServerError = "residual_of_sum";
constexpr const char* kMomentumSteps = "momentum_steps";
constexpr const char* kMomentumExchange = "the exchange of momentum in one_bit_adam";

}  // namespace

ExchangeMemory OneBitAdamExchange::momentum_and_residuals(const ProcessGroupPtr& group, int slices,
                                                          const ShardOptions& options) {
  using Ranks = RememberedTensor::Ranks;
  const RememberedTensor::Extent extent = extent_of_residual(group, slices, options);
  return {name_of(options.compression),
          {{kMomentum, Ranks::kAlike, extent},
           {kMomentumOfSlice, Ranks::kAlike, RememberedTensor::Extent::kSlice},
           {kWorkerError, Ranks::kShares, extent},
           {kServerError, Ranks::kShares, RememberedTensor::Extent::kSlice}},
          {kSteps, kMomentumSteps}};
}

OneBitAdamExchange::OneBitAdamExchange(const ProcessGroupPtr& group, int number, int slices,
                                       const ShardOptions& options)
    : LossyExchange(group, number, slices, options, momentum_and_residuals(group, slices, options)),
      warmup_steps_(static_cast<std::int64_t>(options.compression_options.warmup_steps.at(0, 1))),
      beta1_(options.compression_options.beta1.at(0, kBeta1)) {}

// An exchange of momentum that has begun goes on, whatever warm-up a loaded state had.
bool OneBitAdamExchange::gives_momentum() const {
  return memory().number(kMomentumSteps) > 0 || used_steps() >= warmup_steps_;
}

void OneBitAdamExchange::end_step(bool used) {
  if (used && gives_momentum()) memory().remember(kMomentumSteps, memory().number(kMomentumSteps) + 1);
  LossyExchange::end_step(used);
}

void OneBitAdamExchange::exchange(const GradientBucket& bucket) {
  if (!gives_momentum()) {
    add_up_as_it_is(bucket);
    return follow(bucket);
  }
  if (memory().number(kMomentumSteps) == 0) gather_momentum(bucket);
  if (ranks().all().count == 1) {
    const Tensor before = momentum_before(bucket, bucket.flat);
    bucket.own.copy_(momentum_of_ranks(before, bucket.flat, /*ranks=*/1));
    for (const char* const lost : {kWorkerError, kServerError})
      take(bucket.number, lost, bucket.own);  // by other ranks
    return remember_momentum(bucket, before, bucket.own);
  }
  const Tensor now = has_copies() ? between_copies(bucket) : between_ranks(bucket);
  bucket.own.copy_(divided() && !has_copies() ? ranks().own_slice(now) : now);
}

// Accumulates the momentum of the mean gradient during the warm-up.
void OneBitAdamExchange::follow(const GradientBucket& bucket) {
  const Tensor mean = divided() ? bucket.own : ranks().own_slice(bucket.flat);
  Tensor before = memory().tensor(bucket.number, kMomentumOfSlice);
  if (!before.defined()) before = at::zeros_like(mean);
  const Tensor now = momentum_of_ranks(before, mean, /*ranks=*/1);
  memory().remember(bucket.number, kMomentumOfSlice, at::where(at::isfinite(now), now, before));
}

// All ranks call it, whatever momentum they have: in a state that was saved between two buckets of this step
// an element's momentum is either a slice's or whole.
void OneBitAdamExchange::gather_momentum(const GradientBucket& bucket) {
  const Tensor of_slice = memory().tensor(bucket.number, kMomentumOfSlice);
  const Tensor before = memory().tensor(bucket.number, kMomentum);
  Tensor all = has_copies() ? at::zeros_like(ranks().own_slice(bucket.flat)) : at::zeros_like(bucket.flat);
  if (of_slice.defined()) (has_copies() ? all : ranks().own_slice(all)).copy_(of_slice);
  if (!has_copies()) ranks().all_gather(kMomentumExchange, all, ranks().copy());
  if (before.defined()) all.add_(before);
  memory().replace(bucket.number, kMomentum, std::move(all));
  memory().replace(bucket.number, kMomentumOfSlice, Tensor());
}

Tensor OneBitAdamExchange::momentum_before(const GradientBucket& bucket, const Tensor& like) const {
  const Tensor before = memory().tensor(bucket.number, kMomentum);
  return before.defined() ? before : at::zeros_like(like);
}

// Gives the sum of so many ranks' momentum from the sum of their gradients.
Tensor OneBitAdamExchange::momentum_of_ranks(const Tensor& before, const Tensor& gradient, int ranks) const {
  return before.mul(beta1_ * ranks).add_(gradient.mul(1 - beta1_));
}

void OneBitAdamExchange::remember_momentum(const GradientBucket& bucket, const Tensor& before,
                                           const Tensor& now) {
  memory().remember(bucket.number, kMomentum, at::where(at::isfinite(now), now, before));
}

// Encodes values, which are the bucket's from element `first` on, together with what was held back, and holds
// back what the code loses.
Tensor OneBitAdamExchange::code_of(const GradientBucket& bucket, const char* residual, const Tensor& values,
                                   std::int64_t first, int slices) {
  take(bucket.number, residual, values);
  const std::int64_t elements = values.numel() / slices;
  Tensor codes = empty_codes(slices, elements, /*bits=*/1);
  for (int number = 0; number < slices; ++number) {
    kernels::encode_signs(values.mutable_data_ptr<float>() + number * elements, elements,
                          code_of_slice(codes, number, slices));
  }
  clear_between_parameters(bucket, first, values);  // a sign is never zero
  memory().remember(bucket.number, residual, values);
  return codes;
}

Tensor OneBitAdamExchange::between_copies(const GradientBucket& bucket) {
  const RanksAmong copies = ranks().copies();
  const int among = ranks().copy().count;
  sum_.reduce_scatter(bucket.flat, bucket.own, SliceSum::Over::kCopy, Reduction::kSum);
  const Tensor before = momentum_before(bucket, bucket.own);
  const Tensor own = momentum_of_ranks(before, bucket.own, among);
  take(bucket.number, kServerError, own);  // by ranks that were no copies
  const std::int64_t first = ranks().copy().place * bucket.own.numel();
  const Tensor code = code_of(bucket, kWorkerError, own, first, /*slices=*/1);
  const Tensor all = at::empty({copies.count * code.numel()}, code.options());
  SliceExchange::slice(all, copies.place, copies.count).copy_(code);
  ranks().all_gather(kMomentumExchange, all, copies);
  Tensor now = at::empty_like(before);
  sum_of_codes(all, copies.count, /*bits=*/1, now);
  clear_between_parameters(bucket, first, now);
  now.div_(ranks().all().count);
  remember_momentum(bucket, before, now);
  return now;
}

Tensor OneBitAdamExchange::between_ranks(const GradientBucket& bucket) {
  const RanksAmong& all = ranks().all();
  const Tensor before = momentum_before(bucket, bucket.flat);
  const Tensor codes = code_of(bucket, kWorkerError, momentum_of_ranks(before, bucket.flat, /*ranks=*/1),
                               /*first=*/0, all.count);
  const Tensor received = at::empty_like(codes);
  ranks().all_to_all(kMomentumExchange, codes, received, all);
  Tensor now = at::empty_like(before);
  const Tensor sum = at::empty_like(ranks().own_slice(now));
  sum_of_codes(received, all.count, /*bits=*/1, sum);
  const std::int64_t first = all.place * sum.numel();
  clear_between_parameters(bucket, first, sum);
  ranks().own_slice(received).copy_(code_of(bucket, kServerError, sum, first, /*slices=*/1));
  ranks().all_gather(kMomentumExchange, received, all);
  for (int number = 0; number < all.count; ++number) {
    sum_of_codes(SliceExchange::slice(received, number, all.count), /*count=*/1, /*bits=*/1,
                 SliceExchange::slice(now, number, all.count));
  }
  clear_between_parameters(bucket, /*first=*/0, now);
  now.div_(all.count);
  remember_momentum(bucket, before, now);
  return now;
}

}  // namespace reef
