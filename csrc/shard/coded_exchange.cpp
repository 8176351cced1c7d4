#include "shard/coded_exchange.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "page/huge_pages.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kLost = "residual";
constexpr const char* kLostOfSum = "residual_of_sum";

}  // namespace

ExchangeMemory CodedExchange::residuals(const ProcessGroupPtr& group, int slices, const ShardOptions& options,
                                        const char* method) {
  using Remembered = RememberedTensor;
  return {method,
          {{kLost, Remembered::Ranks::kShares, extent_of_residual(group, slices, options)},
           {kLostOfSum, Remembered::Ranks::kShares, Remembered::Extent::kSlice}}};
}

CodedExchange::CodedExchange(const ProcessGroupPtr& group, int number, int slices,
                             const ShardOptions& options, ExchangeMemory memory)
    : LossyExchange(group, number, slices, options, std::move(memory)),
      name_("the exchange of gradients in " + std::string(name_of(options.compression))) {}

void CodedExchange::exchange(const GradientBucket& bucket) {
  if (!travels_as_codes(bucket)) return add_up_as_it_is(bucket);
  if (has_copies()) {
    between_copies(bucket);
  } else {
    between_ranks(bucket);
  }
  if (by_blocks()) {
    const std::int64_t first = divided() ? ranks().copy().place * bucket.own.numel() : 0;
    clear_between_parameters(bucket, first, bucket.own);
  }
  if (bucket.nonfinite_found) bucket.nonfinite_found(GradientBucket::Where::kOwn);
}

CodedExchange::Code CodedExchange::encode_with(const Tensor& before, const Part& part, const Tensor& left) {
  if (before.defined()) {
    Tensor sum = left;
    at::add_out(sum, part.values, before);
  } else {
    left.copy_(part.values);
  }
  return {encode({part.bucket, left, part.first, part.slices, part.of_sum})};
}

// Adds what was held back, and holds back what it loses.
CodedExchange::Code CodedExchange::code_of(const Part& part) {
  const std::size_t bucket = part.bucket.number;
  const char* const name = part.of_sum ? kLostOfSum : kLost;
  if (!holds_back(part.values)) {
    take(bucket, name, part.values);
    return {encode(part)};
  }
  const Tensor left = room(bucket, name, part.values);
  Code code = encode_with(memory().tensor(bucket, name), part, left);
  memory().remember(bucket, name, left);
  return code;
}

void CodedExchange::between_copies(const GradientBucket& bucket) {
  const RanksAmong copies = ranks().copies();
  sum_.reduce_scatter(bucket.flat, bucket.own, SliceSum::Over::kCopy, Reduction::kSum);
  take(bucket.number, kLostOfSum, bucket.own);
  const std::int64_t first = ranks().copy().place * bucket.own.numel();
  const Tensor code = code_of({bucket, bucket.own, first, /*slices=*/1, /*of_sum=*/false}).codes;
  const Tensor all = on_huge_pages(at::empty({copies.count * code.numel()}, code.options()));
  SliceExchange::slice(all, copies.place, copies.count).copy_(code);
  all_gather(name_.c_str(), all, copies);
  decode(all, copies.count, divisor_of_sum(), bucket.own);
}

void CodedExchange::between_ranks(const GradientBucket& bucket) {
  const RanksAmong& all = ranks().all();
  const auto [codes, seen] = code_of({bucket, bucket.flat, /*first=*/0, all.count, /*of_sum=*/false});
  if (bucket.nonfinite_found && (seen ? *seen : any_nonfinite(codes)))
    bucket.nonfinite_found(GradientBucket::Where::kFlat);
  const Tensor received = on_huge_pages(at::empty_like(codes));
  all_to_all(name_.c_str(), codes, received, all);
  if (divided()) return sum_with_rest(received, bucket);
  const Tensor sum = ranks().own_slice(bucket.flat);
  decode(received, all.count, /*divisor=*/1, sum);
  ranks().own_slice(received).copy_(
      code_of({bucket, sum, all.place * sum.numel(), /*slices=*/1, /*of_sum=*/true}).codes);
  all_gather(name_.c_str(), received, all);
  for (int number = 0; number < all.count; ++number) {
    decode(SliceExchange::slice(received, number, all.count), /*count=*/1, divisor_of_sum(),
           SliceExchange::slice(bucket.flat, number, all.count));
  }
}

// What is held back of sums comes from a state that was saved where nothing was divided.
void CodedExchange::sum_with_rest(const Tensor& codes, const GradientBucket& bucket) {
  const bool has_rest = memory().tensor(bucket.number, kLostOfSum).defined();
  decode(codes, ranks().all().count, has_rest ? 1 : divisor_of_sum(), bucket.own);
  if (!has_rest) return;
  take(bucket.number, kLostOfSum, bucket.own);
  bucket.own.div_(divisor_of_sum());
}

}  // namespace reef
