#include "shard/bfloat16_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kResidual = "residual";
constexpr const char* kResidualOfSum = "residual_of_sum";
constexpr const char* kName = "the exchange of gradients in bfloat16";

bool has_copies(const ProcessGroupPtr& group, int slices, const ShardOptions& options) {
  return options.stage != Stage::kReplicate && slices < group->getSize();
}

ExchangeMemory memory_of(const ProcessGroupPtr& group, int slices, const ShardOptions& options) {
  using Remembered = RememberedTensor;
  const auto extent =
      has_copies(group, slices, options) ? Remembered::Extent::kSlice : Remembered::Extent::kBucket;
  std::vector<Remembered> tensors = {
      {kResidual, Remembered::Ranks::kShares, extent},
      {kResidualOfSum, Remembered::Ranks::kShares, Remembered::Extent::kSlice}};
  return {"bfloat16", std::move(tensors)};
}

// Real and imaginary parts.
Tensor numbers_of(const Tensor& values) {
  return values.is_complex() ? at::view_as_real(values).view({-1}) : values;
}

// Of so many slices, in their order.
void add_up(const Tensor& received, const Tensor& to, int count) {
  const Tensor sum = numbers_of(to);
  sum.copy_(SliceExchange::slice(received, 0, count));
  for (int number = 1; number < count; ++number) sum.add_(SliceExchange::slice(received, number, count));
}

}  // namespace

Bfloat16Exchange::Bfloat16Exchange(const ProcessGroupPtr& group, int number, int slices,
                                   const ShardOptions& options)
    : GradientExchange(group, number, slices, options, memory_of(group, slices, options)) {}

void Bfloat16Exchange::begin_step(std::int64_t step) {
  GradientExchange::begin_step(step);
  sum_.forget();
}

void Bfloat16Exchange::exchange(const GradientBucket& bucket) {
  if (divided() && ranks().copies().count > 1) {
    between_copies(bucket);
  } else {
    between_ranks(bucket);
  }
  if (reduction() == Reduction::kMean && ranks().all().count > 1) bucket.own.div_(ranks().all().count);
}

// Adds what is held back, and holds back what rounding takes.
Tensor Bfloat16Exchange::rounded(std::size_t bucket, const char* name, const Tensor& values) {
  take(bucket, name, values);
  if (values.scalar_type() == at::kBFloat16) return values.clone();
  const Tensor all = numbers_of(values);
  const Tensor sent = all.to(at::kBFloat16);
  Tensor lost = at::sub(all, sent).nan_to_num_(0, 0, 0);
  if (values.is_complex()) lost = at::view_as_complex(lost.view({-1, 2}));
  memory().remember(bucket, name, lost);
  return sent;
}

// Without rounding: what other ranks, or another stage, once held back.
void Bfloat16Exchange::take(std::size_t bucket, const char* name, const Tensor& values) {
  const Tensor before = memory().tensor(bucket, name);
  if (!before.defined()) return;
  values.add_(before);
  memory().remember(bucket, name, Tensor());
}

void Bfloat16Exchange::between_copies(const GradientBucket& bucket) {
  const RanksAmong copies = ranks().copies();
  sum_.reduce_scatter(bucket.flat, bucket.own, SliceSum::Over::kCopy, Reduction::kSum);
  take(bucket.number, kResidualOfSum, bucket.own);
  const Tensor sent = rounded(bucket.number, kResidual, bucket.own);
  const Tensor all = at::empty({copies.count * sent.numel()}, sent.options());
  SliceExchange::slice(all, copies.place, copies.count).copy_(sent);
  ranks().all_gather(kName, all, copies);
  add_up(all, bucket.own, copies.count);
}

void Bfloat16Exchange::between_ranks(const GradientBucket& bucket) {
  const RanksAmong& all = ranks().all();
  if (all.count == 1) {
    take(bucket.number, kResidual, bucket.flat);
    take(bucket.number, kResidualOfSum, bucket.flat);
    if (bucket.flat.const_data_ptr() != bucket.own.const_data_ptr()) bucket.own.copy_(bucket.flat);
    return;
  }
  const Tensor sent = rounded(bucket.number, kResidual, bucket.flat);
  const Tensor received = at::empty_like(sent);
  ranks().all_to_all(kName, sent, received, all);
  if (divided()) {
    add_up(received, bucket.own, all.count);
    return take(bucket.number, kResidualOfSum, bucket.own);
  }
  const Tensor sum = ranks().own_slice(bucket.flat);
  add_up(received, sum, all.count);
  ranks().own_slice(received).copy_(rounded(bucket.number, kResidualOfSum, sum));
  ranks().all_gather(kName, received, all);
  numbers_of(bucket.flat).copy_(received);
}

}  // namespace reef
