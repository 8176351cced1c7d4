#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "distributed/slice_sum.h"
#include "shard/gradient_exchange.h"

namespace reef {

/// What methods have in common by which a gradient arrives changed: copies, what is held back of it, the
/// steps that a schedule counts, and buckets that a method does not take, which are added up as they are.
class LossyExchange : public GradientExchange {
 public:
  using GradientExchange::GradientExchange;
  void begin_step(std::int64_t step) override;
  void end_step(bool used) override;

 protected:
  /// A number of ExchangeMemory: steps that ranks have used, where the method declares it.
  static constexpr const char* kSteps = "steps";
  std::int64_t used_steps() const { return memory().number(kSteps); }

  /// Of what is held back of a rank's gradient: with copies a slice, of which its copy has made the sum.
  static RememberedTensor::Extent extent_of_residual(const ProcessGroupPtr& group, int slices,
                                                     const ShardOptions& options);
  bool has_copies() const { return divided() && ranks().copies().count > 1; }
  static bool is_float_on_cpu(const at::Tensor& flat) {
    return flat.is_cpu() && flat.scalar_type() == at::kFloat;
  }

  /// Adds what is remembered by this name, of which nothing is left then.
  void take(std::size_t bucket, const char* name, const at::Tensor& values);
  /// Returns an uninitialized tensor of the shape and dtype of `values`, for what will be remembered by this
  /// name. On the CPU, outside a budget, it reuses the memory of what was remembered two steps ago, so twice
  /// the bytes stay allocated between steps. Otherwise the C library would return memory of a bucket's size
  /// to the system after each step, and the kernel would clear it again in the next one: a third of the
  /// processor time of training with `gtopk` at density 0.001.
  at::Tensor room(std::size_t bucket, const char* name, const at::Tensor& values);
  /// Zeros, in `values`, which are the bucket's from element `first` on.
  static void clear_between_parameters(const GradientBucket& bucket, std::int64_t first,
                                       const at::Tensor& values);
  /// The sum (or mean) in the order of ranks, with all that was held back.
  void add_up_as_it_is(const GradientBucket& bucket);

  SliceSum sum_{ranks()};

 private:
  std::map<std::pair<std::size_t, std::string>, at::Tensor> rooms_;  ///< by bucket and name; may be undefined
};

}  // namespace reef
