#include "shard/sparse_values.h"

#include <ATen/ops/empty.h>

namespace reef::sparse_values {
namespace {

using at::Tensor;
using kernels::SparseEntry;

// Calls `visit(place, entry)` for those that are among so many values from index `begin` on.
template <class Visit>
void each_place(const SparseGradient& entries, std::int64_t begin, std::int64_t elements,
                const Visit& visit) {
  for (const SparseEntry& each : entries) {
    const std::int64_t place = static_cast<std::int64_t>(each.index) - begin;
    if (place >= 0 && place < elements) visit(place, each);
  }
}

// The places of entries among the values, and the entries divided by `divisor`, both on the values' device.
struct Placed {
  Placed(const SparseGradient& entries, const Tensor& values, std::int64_t begin = 0, float divisor = 1) {
    const auto most = static_cast<std::int64_t>(entries.size());
    const auto on_host =
        at::TensorOptions().pinned_memory(values.is_cuda());  // so that copies are only queued
    const Tensor all_places = at::empty({most}, on_host.dtype(at::kLong));
    const Tensor all_values = at::empty({most}, on_host.dtype(at::kFloat));
    auto* const to_place = all_places.mutable_data_ptr<std::int64_t>();
    auto* const to_value = all_values.mutable_data_ptr<float>();
    std::int64_t count = 0;
    each_place(entries, begin, values.numel(), [&](std::int64_t place, const SparseEntry& entry) {
      to_place[count] = place;
      to_value[count++] = entry.value / divisor;
    });
    places = all_places.narrow(0, 0, count).to(values.device(), /*non_blocking=*/true);
    of_entries = all_values.narrow(0, 0, count).to(values.device(), /*non_blocking=*/true);
  }
  bool empty() const { return places.numel() == 0; }
  Tensor places, of_entries;
};

}  // namespace

SparseGradient take_largest(const Tensor& gradient, const Tensor& residual, const Tensor& left,
                            std::int64_t k) {
  if (gradient.is_cuda()) return kernels::cuda::take_largest(gradient, residual, left, k);
  return kernels::take_largest(gradient.const_data_ptr<float>(),
                               residual.defined() ? residual.const_data_ptr<float>() : nullptr,
                               left.mutable_data_ptr<float>(), gradient.numel(), k);
}

void add(const Tensor& values, const SparseGradient& entries) {
  if (!values.is_cpu()) return by_operators::add(values, entries);
  auto* const to = values.mutable_data_ptr<float>();
  for (const SparseEntry& each : entries) to[each.index] += each.value;
}

void clear(const Tensor& values, const SparseGradient& entries) {
  if (!values.is_cpu()) return by_operators::clear(values, entries);
  auto* const to = values.mutable_data_ptr<float>();
  for (const SparseEntry& each : entries) to[each.index] = 0;
}

void become(const Tensor& values, const SparseGradient& entries, std::int64_t begin, float divisor) {
  if (!values.is_cpu()) return by_operators::become(values, entries, begin, divisor);
  values.zero_();
  auto* const to = values.mutable_data_ptr<float>();
  each_place(entries, begin, values.numel(),
             [&](std::int64_t place, const SparseEntry& entry) { to[place] = entry.value / divisor; });
}

// Avoids index_add_(), whose atomic addition on CUDA flushes subnormal numbers to zero.
void by_operators::add(const Tensor& values, const SparseGradient& entries) {
  const Placed placed(entries, values);
  if (placed.empty()) return;
  values.index_copy_(0, placed.places, values.index_select(0, placed.places).add_(placed.of_entries));
}

void by_operators::clear(const Tensor& values, const SparseGradient& entries) {
  const Placed placed(entries, values);
  if (!placed.empty()) values.index_fill_(0, placed.places, 0);
}

void by_operators::become(const Tensor& values, const SparseGradient& entries, std::int64_t begin,
                          float divisor) {
  values.zero_();
  const Placed placed(entries, values, begin, divisor);
  if (!placed.empty()) values.index_copy_(0, placed.places, placed.of_entries);
}

}  // namespace reef::sparse_values
