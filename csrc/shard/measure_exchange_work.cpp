#include "reef/measure_exchange_work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <random>
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

namespace reef {
namespace {

using at::Tensor;

constexpr std::int64_t kElements = std::int64_t{1} << 20;
constexpr std::int64_t kRows = 1024;  // of a matrix of so many elements

// The fastest of three, for each of so many.
template <class Work>
double seconds_each(const Work& work, double count) {
  double least = std::numeric_limits<double>::infinity();
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    least = std::min(least, seconds.count() / count);
  }
  return least;
}

// Of a generator of its own: the program's is left alone.
Tensor random_values(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Tensor values = at::empty({kElements}, at::kFloat);
  std::generate_n(values.mutable_data_ptr<float>(), kElements, [&] { return normal(random); });
  return values;
}

ExchangeWork measured(double density) {
  const at::NoGradGuard no_grad;
  const Tensor gradient = random_values(1), other = random_values(2);
  const Tensor left = at::empty_like(gradient);
  const double elements = kElements;
  const auto k = static_cast<std::int64_t>(std::ceil(density * elements));
  const auto take = [&](const Tensor& from) {
    return kernels::take_largest(from.const_data_ptr<float>(), other.const_data_ptr<float>(),
                                 left.mutable_data_ptr<float>(), kElements, k);
  };
  ExchangeWork work;
  work.add = seconds_each(
      [&] {
        kernels::ordered_sum({gradient.const_data_ptr<float>(), other.const_data_ptr<float>()},
                             left.mutable_data_ptr<float>(), kElements, 1);
      },
      elements);
  const Tensor rounded = at::empty_like(gradient, at::kBFloat16);
  work.round = seconds_each(
      [&] {
        kernels::round_to_sixteen_bits(gradient.const_data_ptr<float>(), other.const_data_ptr<float>(),
                                       kElements, kernels::FloatFormat::kBFloat16,
                                       static_cast<std::uint16_t*>(rounded.mutable_data_ptr()),
                                       left.mutable_data_ptr<float>());
      },
      elements);
  work.select = seconds_each([&] { take(gradient); }, elements);
  const Tensor packed = empty_codes(/*slices=*/1, kElements, /*bits=*/8);
  std::uint8_t* const code = code_of_slice(packed, 0, 1);
  work.quantize = seconds_each(
      [&] { kernels::encode_levels(gradient.const_data_ptr<float>(), kElements, 8, /*key=*/1, code); },
      elements);
  work.unpack = seconds_each([&] { sum_of_codes(packed, /*count=*/1, /*bits=*/8, left); }, elements);
  work.sign =
      seconds_each([&] { kernels::encode_signs(left.mutable_data_ptr<float>(), kElements, code); }, elements);
  const double multiplied = kFactorRank * elements;
  const Tensor matrix = gradient.clone().view({kRows, kElements / kRows});
  const Tensor right = at::mm(other.narrow(0, 0, kFactorRank * kRows).view({kFactorRank, kRows}), matrix);
  Tensor factor;
  work.multiply = seconds_each([&] { factor = at::mm(right, matrix.t()); }, multiplied);
  work.rebuild = seconds_each(
      [&] {
        kernels::take_low_rank(matrix.mutable_data_ptr<float>(), left.mutable_data_ptr<float>(),
                               factor.const_data_ptr<float>(), right.const_data_ptr<float>(), kRows,
                               kElements / kRows, kFactorRank, /*divisor=*/2);
      },
      multiplied);
  const SparseGradient a = take(gradient), b = take(other);
  work.merge = seconds_each([&] { merge_largest(a, b, static_cast<std::size_t>(k)); },
                            static_cast<double>(a.size() + b.size()));
  return work;
}

}  // namespace

ExchangeWork measure_exchange_work(const ProcessGroupPtr& group, double density) {
  if (!group)
    throw ConfigError(
        "reef::measure_exchange_work was given no process group: make one with reef::init_process_group.");
  check_compression(Compression::kTopK, {.density = density});
  ExchangeWork work = measured(density);
  if (group->getSize() == 1) return work;
  note_call(*group, "reef::measure_exchange_work");
  double* const each[] = {&work.add,  &work.round,  &work.select,   &work.merge,  &work.quantize,
                          &work.sign, &work.unpack, &work.multiply, &work.rebuild};
  const Tensor slowest = at::empty({static_cast<std::int64_t>(std::size(each))}, at::kDouble);
  for (std::size_t i = 0; i < std::size(each); ++i) slowest.mutable_data_ptr<double>()[i] = *each[i];
  const GroupTags tags = GroupTags::take(group, 1, at::kCPU);
  SliceExchange(group, tags.first(), group->getSize()).largest(slowest);
  for (std::size_t i = 0; i < std::size(each); ++i) *each[i] = slowest.const_data_ptr<double>()[i];
  return work;
}

}  // namespace reef
