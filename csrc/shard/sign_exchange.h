#pragma once

#include "shard/coded_exchange.h"

namespace reef {

/// signSGD with error feedback (Karimireddy et al., 1901.09847, algorithm 2): an element travels as its sign,
/// and each 512 with their mean magnitude. What that loses of gradients and of sums is held back.
///
/// A code of a slice is 68 bytes for each 512 elements. Codes are of float32 on the CPU; other buckets are
/// added up as they are. What is not finite arrives as NaN, and so does its block, and takes what was held
/// back for that with it.
class SignExchange final : public CodedExchange {
 public:
  SignExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
      : CodedExchange(group, number, slices, options, residuals(group, slices, options, "sign")) {}

 private:
  bool encodes(const at::Tensor& flat) const override { return is_float_on_cpu(flat); }
  bool by_blocks() const override { return true; }
  bool holds_back(const at::Tensor&) const override { return true; }
  at::Tensor encode(const Part& part) override;
  void decode(const at::Tensor& codes, int count, int divisor, const at::Tensor& to) const override;
  bool any_nonfinite(const at::Tensor& codes) const override;
};

}  // namespace reef
