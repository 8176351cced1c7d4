#include "shard/sixteen_bit_exchange.h"

#include <ATen/ops/view_as_real.h>

#include "kernels/count_nonfinite.h"

namespace reef {
namespace {

using at::Tensor;

// Real and imaginary parts.
Tensor numbers_of(const Tensor& values) {
  return values.is_complex() ? at::view_as_real(values).view({-1}) : values;
}

}  // namespace

SixteenBitExchange::SixteenBitExchange(const ProcessGroupPtr& group, int number, int slices,
                                       const ShardOptions& options, at::ScalarType dtype)
    : CodedExchange(group, number, slices, options,
                    residuals(group, slices, options, name_of(options.compression))),
      dtype_(dtype) {}

Tensor SixteenBitExchange::encode(const Part& part) {
  if (!holds_back(part.values)) return part.values.clone();
  const Tensor all = numbers_of(part.values);
  Tensor sent = all.to(dtype_);
  all.sub_(sent).nan_to_num_(0, 0, 0);
  return sent;
}

void SixteenBitExchange::decode(const Tensor& codes, int count, const Tensor& to) const {
  const Tensor sum = numbers_of(to);
  sum.copy_(SliceExchange::slice(codes, 0, count));
  for (int number = 1; number < count; ++number) sum.add_(SliceExchange::slice(codes, number, count));
}

bool SixteenBitExchange::any_nonfinite(const Tensor& codes) const {
  const auto format = kernels::float_format(codes);
  return kernels::cpu::count_nonfinite(codes.const_data_ptr(), codes.numel(), *format) > 0;
}

}  // namespace reef
