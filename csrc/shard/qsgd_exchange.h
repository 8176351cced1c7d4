#pragma once

#include "shard/coded_exchange.h"

namespace reef {

/// QSGD (1610.02132): an element travels as one of 2^bits - 1 levels of its block, chosen by chance so that
/// its mean is the element. Unbiased, so nothing is held back; see kernels/packed_levels.h for the levels and
/// their variance. The random numbers are a function of the seed, of how many steps the ranks have used, the
/// rank and the bucket: ranks' errors are independent of each other, a run that is resumed has the same, and
/// a step that no rank uses leaves nothing.
///
/// A code of a slice is 4 + 64 bits bytes for each 512 elements, and travels so or, if the options ask for
/// it, entropy coded (entropy_coded_messages.h). Codes are of float32 on the CPU; other buckets are added up
/// as they are. What is not finite arrives as NaN, and so does its block.
class QsgdExchange final : public CodedExchange {
 public:
  QsgdExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options);

 private:
  bool encodes(const at::Tensor& flat) const override { return is_float_on_cpu(flat); }
  bool by_blocks() const override { return true; }
  bool holds_back(const at::Tensor&) const override { return false; }
  at::Tensor encode(const Part& part) override;
  void decode(const at::Tensor& codes, int count, int divisor, const at::Tensor& to) const override;
  bool any_nonfinite(const at::Tensor& codes) const override;
  void all_to_all(const char* name, const at::Tensor& codes, const at::Tensor& received,
                  const RanksAmong& among) override;
  void all_gather(const char* name, const at::Tensor& codes, const RanksAmong& among) override;
  int bits() const;

  StepSchedule bits_;
  std::uint64_t seed_;
  bool entropy_coded_;
};

}  // namespace reef
