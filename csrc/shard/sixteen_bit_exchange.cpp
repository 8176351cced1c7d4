#include "shard/sixteen_bit_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <vector>

#include "kernels/count_nonfinite.h"
#include "kernels/sixteen_bit.h"
#include "page/huge_pages.h"

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

// float32 on the CPU by kernels of one pass, with the same bits as the operators.
CodedExchange::Code SixteenBitExchange::encode_with(const Tensor& before, const Part& part,
                                                    const Tensor& left) {
  if (!is_float_on_cpu(part.values)) return CodedExchange::encode_with(before, part, left);
  const Tensor sent = on_huge_pages(at::empty(part.values.sizes(), part.values.options().dtype(dtype_)));
  const bool any = kernels::round_to_sixteen_bits(
      part.values.const_data_ptr<float>(), before.defined() ? before.const_data_ptr<float>() : nullptr,
      sent.numel(), *kernels::float_format(sent), static_cast<std::uint16_t*>(sent.mutable_data_ptr()),
      left.mutable_data_ptr<float>());
  return {sent, any};
}

void SixteenBitExchange::decode(const Tensor& codes, int count, int divisor, const Tensor& to) const {
  if (is_float_on_cpu(to)) {
    std::vector<const std::uint16_t*> parts;
    for (int number = 0; number < count; ++number) {
      const Tensor part = SliceExchange::slice(codes, number, count);
      parts.push_back(static_cast<const std::uint16_t*>(part.const_data_ptr()));
    }
    return kernels::sum_of_sixteen_bits(parts, to.numel(), *kernels::float_format(codes), divisor,
                                        to.mutable_data_ptr<float>());
  }
  const Tensor sum = numbers_of(to);
  sum.copy_(SliceExchange::slice(codes, 0, count));
  for (int number = 1; number < count; ++number) sum.add_(SliceExchange::slice(codes, number, count));
  if (divisor != 1) to.div_(divisor);
}

bool SixteenBitExchange::any_nonfinite(const Tensor& codes) const {
  const auto format = kernels::float_format(codes);
  return kernels::cpu::count_nonfinite(codes.const_data_ptr(), codes.numel(), *format) > 0;
}

}  // namespace reef
