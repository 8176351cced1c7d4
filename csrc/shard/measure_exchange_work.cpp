#include "reef/measure_exchange_work.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/group_tags.h"
#include "distributed/members.h"
#include "distributed/slice_exchange.h"
#include "factor_rank.h"
#include "kernels/low_rank.h"
#include "kernels/ordered_sum.h"
#include "kernels/packed_levels.h"
#include "kernels/sixteen_bit.h"
#include "reef/error.h"
#include "shard/packed_code.h"
#include "shard/sparse_gradient.h"
#include "shard/sparse_values.h"

namespace reef {
namespace {

using at::Tensor;

constexpr std::int64_t kLeastElements = std::int64_t{1} << 16;  // fewer are too fast for a clock
constexpr std::int64_t kMostElements = std::int64_t{1} << 22;   // vectors that do not fit into a cache
constexpr std::int64_t kRows = 1024;                            // of a matrix of all elements
constexpr int kRepetitions = 3;

// Measures work on this rank while all others do the same work.
class WorkMeter {
 public:
  explicit WorkMeter(const ProcessGroupPtr& group) {
    if (group->getSize() == 1) return;
    tags_ = GroupTags::take(group, 1, at::kCPU);
    ranks_.emplace(group, tags_.first(), group->getSize());
  }

  // Gives the median of the repetitions, divided by `count`.
  template <class Work>
  double seconds_each(const Work& work, double count) {
    std::array<double, kRepetitions> taken;
    for (double& each : taken) {
      begin_together();
      const auto begin = std::chrono::steady_clock::now();
      work();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      each = seconds.count() / count;
    }
    std::sort(taken.begin(), taken.end());
    return taken[kRepetitions / 2];
  }

  // Every value becomes the largest of all ranks'.
  void largest(const Tensor& values) {
    if (ranks_) ranks_->largest(values);
  }

 private:
  void begin_together() { largest(at::zeros({1}, at::kDouble)); }

  GroupTags tags_;
  std::optional<SliceExchange> ranks_;
};

// Draws from a generator of its own and leaves the program's alone.
Tensor random_values(std::int64_t elements, std::uint64_t seed) {
  return at::empty({elements}, at::kFloat).normal_(0, 1, at::detail::createCPUGenerator(seed));
}

ExchangeWork measured(WorkMeter& meter, double density, std::int64_t count) {
  const at::NoGradGuard no_grad;
  const Tensor gradient = random_values(count, 1), other = random_values(count, 2);
  const Tensor left = at::empty_like(gradient);
  const auto elements = static_cast<double>(count);
  const auto k = static_cast<std::int64_t>(std::ceil(density * elements));
  const auto take = [&](const Tensor& from) {
    return kernels::take_largest(from.const_data_ptr<float>(), other.const_data_ptr<float>(),
                                 left.mutable_data_ptr<float>(), count, k);
  };
  ExchangeWork work;
  work.add = meter.seconds_each(
      [&] {
        kernels::ordered_sum({gradient.const_data_ptr<float>(), other.const_data_ptr<float>()},
                             left.mutable_data_ptr<float>(), count, 1);
      },
      elements);
  const Tensor rounded = at::empty_like(gradient, at::kBFloat16);
  work.round = meter.seconds_each(
      [&] {
        kernels::round_to_sixteen_bits(gradient.const_data_ptr<float>(), other.const_data_ptr<float>(), count,
                                       kernels::FloatFormat::kBFloat16,
                                       static_cast<std::uint16_t*>(rounded.mutable_data_ptr()),
                                       left.mutable_data_ptr<float>());
      },
      elements);
  work.select = meter.seconds_each([&] { take(gradient); }, elements);
  const Tensor packed = empty_codes(/*slices=*/1, count, /*bits=*/8);
  std::uint8_t* const code = code_of_slice(packed, 0, 1);
  work.quantize = meter.seconds_each(
      [&] { kernels::encode_levels(gradient.const_data_ptr<float>(), count, 8, /*key=*/1, code); }, elements);
  work.unpack = meter.seconds_each([&] { sum_of_codes(packed, /*count=*/1, /*bits=*/8, left); }, elements);
  work.sign = meter.seconds_each([&] { kernels::encode_signs(left.mutable_data_ptr<float>(), count, code); },
                                 elements);
  const double multiplied = kFactorRank * elements;
  const Tensor matrix = gradient.clone().view({kRows, count / kRows});
  const Tensor right = at::mm(other.narrow(0, 0, kFactorRank * kRows).view({kFactorRank, kRows}), matrix);
  Tensor factor;
  work.multiply = meter.seconds_each([&] { factor = at::mm(right, matrix.t()); }, multiplied);
  work.rebuild = meter.seconds_each(
      [&] {
        kernels::take_low_rank(matrix.mutable_data_ptr<float>(), left.mutable_data_ptr<float>(),
                               factor.const_data_ptr<float>(), right.const_data_ptr<float>(), kRows,
                               count / kRows, kFactorRank, /*divisor=*/2);
      },
      multiplied);
  const SparseGradient a = take(gradient), b = take(other);
  work.write = meter.seconds_each([&] { sparse_values::become(left, a, 0, /*divisor=*/2); }, elements);
  work.merge = meter.seconds_each([&] { merge_largest(a, b, static_cast<std::size_t>(k)); },
                                  static_cast<double>(a.size() + b.size()));
  return work;
}

}  // namespace

ExchangeWork measure_exchange_work(const ProcessGroupPtr& group, double density, std::int64_t elements) {
  if (!group)
    throw ConfigError(
        "reef::measure_exchange_work was given no process group: make one with reef::init_process_group.");
  check_compression(Compression::kTopK, {.density = density});
  if (elements < 1)
    throw ConfigError("reef::measure_exchange_work was given " + std::to_string(elements) +
                      " elements: give as many as will be exchanged.");
  note_call(*group, "reef::measure_exchange_work");
  WorkMeter meter(group);
  const std::int64_t count = std::clamp(elements, kLeastElements, kMostElements) / kRows * kRows;
  ExchangeWork work = measured(meter, density, count);
  const Tensor slowest = at::empty({static_cast<std::int64_t>(kExchangeWorkMembers.size())}, at::kDouble);
  auto* const seconds = slowest.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < kExchangeWorkMembers.size(); ++i) seconds[i] = work.*kExchangeWorkMembers[i];
  meter.largest(slowest);
  for (std::size_t i = 0; i < kExchangeWorkMembers.size(); ++i) work.*kExchangeWorkMembers[i] = seconds[i];
  return work;
}

}  // namespace reef
