#include "shard/sparse_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"
#include "shard/sparse_values.h"

namespace reef {
namespace {

using at::Tensor;
using kernels::SparseEntry;

constexpr const char* kHeldBack = "residual";
constexpr double kDensity = 0.001;
// In place of an entry that there is not.
constexpr std::uint32_t kNothing = std::numeric_limits<std::uint32_t>::max();

at::TensorOptions as_sent() { return at::TensorOptions().dtype(at::kInt); }

Tensor packed(const SparseGradient& entries, std::size_t k) {
  Tensor tensor = at::empty({static_cast<std::int64_t>(2 * k)}, as_sent());
  auto* const to = static_cast<SparseEntry*>(tensor.mutable_data_ptr());
  std::fill(std::copy(entries.begin(), entries.end(), to), to + k, SparseEntry{kNothing, 0});
  return tensor;
}

SparseGradient unpacked(const Tensor& tensor) {
  const auto* const first = static_cast<const SparseEntry*>(tensor.const_data_ptr());
  const auto* const last = first + tensor.numel() / 2;
  return {first, std::find_if(first, last, [](const SparseEntry& each) { return each.index == kNothing; })};
}

std::vector<RememberedTensor> with(RememberedTensor first, std::vector<RememberedTensor> more) {
  more.insert(more.begin(), std::move(first));
  return more;
}

}  // namespace

SparseExchange::SparseExchange(const ProcessGroupPtr& group, int number, int slices,
                               const ShardOptions& options, const char* method,
                               std::vector<RememberedTensor> more)
    : LossyExchange(
          group, number, slices, options,
          {method,
           with({kHeldBack, RememberedTensor::Ranks::kShares, extent_of_residual(group, slices, options)},
                std::move(more)),
           {kSteps}}),
      density_(options.compression_options.density) {}

void SparseExchange::Residual::add(const SparseGradient& entries) const {
  SparseGradient finite;
  std::copy_if(entries.begin(), entries.end(), std::back_inserter(finite),
               [](const SparseEntry& each) { return std::isfinite(each.value); });
  sparse_values::add(tensor_, finite);
}

void SparseExchange::exchange(const GradientBucket& bucket) {
  if (takes_largest(bucket)) {
    exchange_sparse(bucket);
  } else {
    exchange_as_it_is(bucket);
  }
}

Tensor SparseExchange::addend(std::size_t /*bucket*/, const Tensor& gradient, const RanksAmong& /*among*/) {
  return gradient;
}
void SparseExchange::added(std::size_t /*bucket*/, const Tensor& /*addend*/,
                           const SparseGradient& /*taken*/) {}

void SparseExchange::exchange_as_it_is(const GradientBucket& bucket) {
  const Tensor own = addend(bucket.number, bucket.flat, ranks().all());
  if (!own.is_same(bucket.flat)) bucket.flat.copy_(own);
  added(bucket.number, own, {});
  add_up_as_it_is(bucket);
}

void SparseExchange::exchange_sparse(const GradientBucket& bucket) {
  if (has_copies()) sum_.reduce_scatter(bucket.flat, bucket.own, SliceSum::Over::kCopy, Reduction::kSum);
  const Tensor& values = has_copies() ? bucket.own : bucket.flat;
  const std::int64_t elements = values.numel();
  if (elements >= kNothing) {
    throw ConfigError("reef::shard compresses a bucket of " + std::to_string(elements) +
                      " elements, which are more than 32 bits count: give smaller bucket_bytes.");
  }
  const double density = density_.at(used_steps(), kDensity);
  const auto k = static_cast<std::size_t>(std::ceil(density * static_cast<double>(elements)));

  const RanksAmong among = has_copies() ? ranks().copies() : ranks().all();
  const Tensor to_add = addend(bucket.number, values, among);
  const Tensor before = memory().tensor(bucket.number, kHeldBack);
  const Tensor left = room(bucket.number, kHeldBack, values);
  const SparseGradient own = sparse_values::take_largest(to_add, before, left, static_cast<std::int64_t>(k));
  const auto tell_of_nonfinite = [&](const SparseGradient& entries, GradientBucket::Where where) {
    const auto finite = [](const SparseEntry& each) { return std::isfinite(each.value); };
    if (bucket.nonfinite_found && !std::all_of(entries.begin(), entries.end(), finite))
      bucket.nonfinite_found(where);
  };
  tell_of_nonfinite(own, GradientBucket::Where::kFlat);
  added(bucket.number, to_add, own);
  const SparseGradient all = sum(own, k, among, Residual(left));
  memory().remember(bucket.number, kHeldBack, left);

  const std::int64_t begin = divided() && !has_copies() ? ranks().copy().place * bucket.own.numel() : 0;
  const float divisor = reduction() == Reduction::kMean ? static_cast<float>(ranks().all().count) : 1.0F;
  sparse_values::become(bucket.own, all, begin, divisor);
  tell_of_nonfinite(all, GradientBucket::Where::kOwn);
}

SparseGradient SparseExchange::transfer(const char* name, const SparseGradient& entries, std::size_t k,
                                        std::optional<int> to, std::optional<int> from) {
  std::vector<SliceExchange::Transfer> sent, received;
  if (to) sent.push_back({*to, packed(entries, k)});
  if (from) received.push_back({*from, at::empty({static_cast<std::int64_t>(2 * k)}, as_sent())});
  ranks().transfer(name, sent, received, as_sent());
  return from ? unpacked(received.front().tensor) : SparseGradient();
}

std::vector<SparseGradient> SparseExchange::exchange_parts(const char* name,
                                                           const std::vector<SparseGradient>& parts,
                                                           const std::vector<std::size_t>& sizes,
                                                           const RanksAmong& among) {
  std::vector<SliceExchange::Transfer> sent, received;
  std::vector<SparseGradient> all(parts.size());
  std::vector<std::size_t> received_from;
  for (int step = 1; step < among.count; ++step) {  // each rank begins with another
    const int to = among.number_behind(step), from = among.number_behind(among.count - step);
    const SparseGradient& part = parts[static_cast<std::size_t>(to)];
    const std::size_t size = sizes[static_cast<std::size_t>(from)];
    if (!part.empty()) sent.push_back({among.at(to), packed(part, part.size())});
    if (size == 0) continue;
    received.push_back({among.at(from), at::empty({static_cast<std::int64_t>(2 * size)}, as_sent())});
    received_from.push_back(static_cast<std::size_t>(from));
  }
  ranks().transfer(name, sent, received, as_sent());
  all[static_cast<std::size_t>(among.place)] = parts[static_cast<std::size_t>(among.place)];
  for (std::size_t i = 0; i < received.size(); ++i) all[received_from[i]] = unpacked(received[i].tensor);
  return all;
}

std::vector<SparseGradient> SparseExchange::gather(const char* name, const SparseGradient& own, std::size_t k,
                                                   const RanksAmong& among) {
  const Tensor all = at::empty({among.count * static_cast<std::int64_t>(2 * k)}, as_sent());
  SliceExchange::slice(all, among.place, among.count).copy_(packed(own, k));
  ranks().all_gather(name, all, among);
  std::vector<SparseGradient> gathered;
  for (int number = 0; number < among.count; ++number)
    gathered.push_back(unpacked(SliceExchange::slice(all, number, among.count)));
  return gathered;
}

}  // namespace reef
