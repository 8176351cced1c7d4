#include "shard/dgc_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "kernels/sum_of_squares.h"
#include "shard/sparse_values.h"
#include "typed_operator.h"

namespace reef {
namespace {

using at::Tensor;
using kernels::ExactSum;

// Not `momentum`, which in a state of LocalUpdates is the outer one, and the same on all ranks.
constexpr const char* kMomentumOfRank = "momentum_of_rank";
constexpr double kShareLeft = 0.9;
constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// On a device as clip_grad_norm_() has them there.
ExactSum squares_of(const Tensor& gradient) {
  if (gradient.is_cpu()) {
    return kernels::sum_of_squares(gradient.const_data_ptr(), gradient.numel(),
                                   kernels::FloatFormat::kFloat32);
  }
  static const auto op = typed_operator<Tensor(const Tensor&)>("reef::sum_of_squares");
  const Tensor of_sum = op.call(gradient);
  ExactSum::Digits digits{};
  std::copy_n(of_sum.const_data_ptr<std::int64_t>(), digits.size(), digits.begin());
  ExactSum sum;
  sum.add(digits);
  return sum;
}

}  // namespace

DgcExchange::DgcExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
    : TopKExchange(group, number, slices, options, "dgc",
                   {{kMomentumOfRank, RememberedTensor::Ranks::kMomentum,
                     extent_of_residual(group, slices, options)}}),
      momentum_(options.compression_options.momentum),
      max_norm_(options.compression_options.max_norm) {}

Tensor DgcExchange::addend(std::size_t bucket, const Tensor& gradient, const RanksAmong& among) {
  const double scale = clipping(gradient, among);
  const Tensor clipped = scale < 1 ? gradient.mul(scale) : gradient;
  const Tensor before = memory().tensor(bucket, kMomentumOfRank);
  return before.defined() ? before.mul(momentum_.at(used_steps(), kShareLeft)).add_(clipped)
                          : clipped.clone();
}

void DgcExchange::added(std::size_t bucket, const Tensor& addend, const SparseGradient& taken) {
  bool finite = !taken.empty();  // what is not would have been taken first
  for (const kernels::SparseEntry& each : taken) finite = finite && std::isfinite(each.value);
  sparse_values::clear(addend, taken);
  if (!finite) addend.masked_fill_(addend.isfinite().logical_not(), 0);
  memory().remember(bucket, kMomentumOfRank, addend);
}

// Gives the factor that clips a gradient. One that is not finite is left alone, and arrives as such.
double DgcExchange::clipping(const Tensor& gradient, const RanksAmong& among) {
  const double max_norm = max_norm_.at(used_steps(), kNoLimit);
  if (max_norm == kNoLimit) return 1;
  ExactSum squares = squares_of(gradient);
  if (has_copies()) {
    const RanksAmong& copy = ranks().copy();
    const ExactSum::Digits own = squares.carried();
    const Tensor all =
        at::empty({copy.count * static_cast<std::int64_t>(own.size())}, at::TensorOptions().dtype(at::kLong));
    const auto digits_of = [&](int number) {
      return SliceExchange::slice(all, number, copy.count).mutable_data_ptr<std::int64_t>();
    };
    std::copy(own.begin(), own.end(), digits_of(copy.place));
    ranks().all_gather("the exchange of a copy's norm", all, copy);
    squares = ExactSum();
    for (int number = 0; number < copy.count; ++number) {
      ExactSum::Digits digits{};
      std::copy_n(digits_of(number), digits.size(), digits.begin());
      squares.add(digits);
    }
  }
  const double addends = reduction() == Reduction::kMean ? ranks().all().count : 1;
  const double limit = max_norm * addends / std::sqrt(among.count);
  const double norm = std::sqrt(squares.value());
  return std::isfinite(norm) && norm > limit ? limit / norm : 1;
}

}  // namespace reef
