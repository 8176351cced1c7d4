#pragma once

#include "shard/coded_exchange.h"

namespace reef {

/// The sum (or mean) of gradients that travel as bfloat16 or float16, half the bytes of float32. What
/// rounding takes from a gradient is held back. Buckets of that dtype are added up as they are.
///
/// What is not finite, or is too large for the dtype (float16: from 65520 on, sums as well), arrives as an
/// infinity or NaN, and takes what was held back for that element with it.
class SixteenBitExchange final : public CodedExchange {
 public:
  /// `dtype`: kBFloat16 or kHalf.
  SixteenBitExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options,
                     at::ScalarType dtype);

 private:
  bool encodes(const at::Tensor&) const override { return true; }
  bool by_blocks() const override { return false; }
  bool holds_back(const at::Tensor& values) const override { return values.scalar_type() != dtype_; }
  at::Tensor encode(const Part& part) override;
  Code encode_with(const at::Tensor& before, const Part& part, const at::Tensor& left) override;
  void decode(const at::Tensor& codes, int count, int divisor, const at::Tensor& to) const override;
  bool any_nonfinite(const at::Tensor& codes) const override;

  at::ScalarType dtype_;
};

}  // namespace reef
