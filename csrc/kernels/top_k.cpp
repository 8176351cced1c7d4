#include "kernels/top_k.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <type_traits>

namespace reef::kernels {
namespace {

using Entries = std::vector<SparseEntry>;

constexpr std::int64_t kSamples = 16384;
constexpr std::int64_t kTogether = 32;  // looked at by one comparison
constexpr std::uint32_t kLeast = 1;     // zeros are no entries

std::uint32_t magnitude_of_sum(const float* gradient, const float* residual, std::int64_t i) {
  return magnitude_bits(residual != nullptr ? gradient[i] + residual[i] : gradient[i]);
}

// Magnitudes from this one on are some more than `k`, if a sample tells: three standard deviations of the
// number of samples above it.
std::uint32_t sampled_threshold(const float* gradient, const float* residual, std::int64_t elements,
                                std::int64_t k) {
  const std::int64_t samples = std::min(kSamples, elements);
  std::vector<std::uint32_t> magnitudes(static_cast<std::size_t>(samples));
  // One of each stretch, not always at the same place: rows of matrices may be as long.
  std::uint64_t random = 88172645463325252U;
  for (std::int64_t i = 0; i < samples; ++i) {
    const std::int64_t first = i * elements / samples;
    const std::int64_t length = (i + 1) * elements / samples - first;
    random ^= random << 13U;
    random ^= random >> 7U;
    random ^= random << 17U;
    const auto place = static_cast<std::int64_t>(random % static_cast<std::uint64_t>(length));
    magnitudes[static_cast<std::size_t>(i)] = magnitude_of_sum(gradient, residual, first + place);
  }
  const double expected =
      static_cast<double>(k) * static_cast<double>(samples) / static_cast<double>(elements);
  const auto above = static_cast<std::int64_t>(std::ceil(expected + 3 * std::sqrt(expected) + 1));
  if (above >= samples) return kLeast;
  const auto at = magnitudes.begin() + above;
  std::nth_element(magnitudes.begin(), at, magnitudes.end(), std::greater<>());
  return std::max(*at, kLeast);
}

// Sums of `count` elements, and the largest magnitude of them. The compiler knows kTogether.
template <class Count>
std::int32_t add(const float* gradient, const float* residual, float* sums, Count count) {
  std::int32_t largest = 0;
  if (residual == nullptr) {
    std::copy_n(gradient, static_cast<std::int64_t>(count), sums);
  } else {
    for (std::int64_t i = 0; i < count; ++i) sums[i] = gradient[i] + residual[i];
  }
  for (std::int64_t i = 0; i < count; ++i)
    largest = std::max(largest, static_cast<std::int32_t>(magnitude_bits(sums[i])));
  return largest;
}

// Sums into `left`, and those from `threshold` on among `entries`, unless they are more than `most`.
bool add_and_collect(const float* gradient, const float* residual, float* left, std::int64_t elements,
                     std::uint32_t threshold, std::size_t most, Entries& entries) {
  const auto least = static_cast<std::int32_t>(threshold);
  using Together = std::integral_constant<std::int64_t, kTogether>;
  bool collects = true;
  for (std::int64_t begin = 0; begin < elements; begin += kTogether) {
    const std::int64_t count = std::min(kTogether, elements - begin);
    const float* const of_residual = residual == nullptr ? nullptr : residual + begin;
    alignas(64) std::array<float, kTogether> sums;
    const std::int32_t largest = count == kTogether
                                     ? add(gradient + begin, of_residual, sums.data(), Together{})
                                     : add(gradient + begin, of_residual, sums.data(), count);
    std::copy_n(sums.data(), count, left + begin);
    if (largest < least || !collects) continue;
    for (std::int64_t i = 0; i < count; ++i) {
      const float sum = sums[static_cast<std::size_t>(i)];
      if (magnitude_bits(sum) >= threshold) entries.push_back({static_cast<std::uint32_t>(begin + i), sum});
    }
    collects = entries.size() <= most;
  }
  return collects;
}

// The magnitude of the k-th largest, and how many are larger, of `k` that are there.
struct Kth {
  std::uint32_t magnitude;
  std::int64_t larger;
};

// Of entries, few enough to be looked at again: those with the high bits of the k-th.
Kth kth_of(const Entries& entries, std::int64_t k) {
  constexpr std::uint32_t kHigh = 11, kLow = 31 - kHigh;
  std::array<std::int64_t, std::size_t{1} << kHigh> counts{};
  for (const SparseEntry& each : entries) ++counts[magnitude_bits(each.value) >> kLow];
  std::int64_t larger = 0;
  std::size_t bin = counts.size() - 1;
  while (larger + counts[bin] < k) larger += counts[bin--];
  std::vector<std::uint32_t> among;
  among.reserve(static_cast<std::size_t>(counts[bin]));
  for (const SparseEntry& each : entries) {
    const std::uint32_t bits = magnitude_bits(each.value);
    if (bits >> kLow == bin) among.push_back(bits);
  }
  const auto at = among.begin() + (k - larger - 1);
  std::nth_element(among.begin(), at, among.end(), std::greater<>());
  larger += std::count_if(among.begin(), at, [&](std::uint32_t bits) { return bits > *at; });
  return {*at, larger};
}

Kth kth_largest(const float* values, std::int64_t elements, std::int64_t k) {
  constexpr std::uint32_t kLow = 16;
  std::vector<std::int64_t> counts(std::size_t{1} << kLow);
  const auto bin_of_kth = [&](std::int64_t& larger) {
    std::size_t bin = counts.size() - 1;
    while (bin > 0 && larger + counts[bin] < k) larger += counts[bin--];
    return static_cast<std::uint32_t>(bin);
  };
  std::int64_t larger = 0;
  for (std::int64_t i = 0; i < elements; ++i) ++counts[magnitude_bits(values[i]) >> kLow];
  const std::uint32_t high = bin_of_kth(larger);
  std::fill(counts.begin(), counts.end(), 0);
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint32_t bits = magnitude_bits(values[i]);
    if (bits >> kLow == high) ++counts[bits & 0xFFFFU];
  }
  const std::uint32_t low = bin_of_kth(larger);
  return {(high << kLow) | low, larger};
}

Entries largest_by_counts(const float* values, std::int64_t elements, std::int64_t k) {
  const Kth kth = kth_largest(values, elements, k);
  std::int64_t equal = kth.magnitude == 0 ? 0 : k - kth.larger;
  Entries entries;
  entries.reserve(static_cast<std::size_t>(kth.larger + equal));
  for (std::int64_t i = 0; i < elements; ++i) {
    const std::uint32_t bits = magnitude_bits(values[i]);
    if (bits < kth.magnitude || (bits == kth.magnitude && equal == 0)) continue;
    if (bits == kth.magnitude) --equal;
    entries.push_back({static_cast<std::uint32_t>(i), values[i]});
  }
  return entries;
}

}  // namespace

void keep_largest(Entries& entries, std::size_t k, Entries* dropped) {
  if (entries.size() <= k) return;
  const std::size_t others = entries.size() - k;
  const Kth kth = k == 0 ? Kth{0xFFFFFFFFU, 0} : kth_of(entries, static_cast<std::int64_t>(k));
  std::size_t equal = k - static_cast<std::size_t>(kth.larger);  // the first of which are kept
  SparseEntry nowhere;
  if (dropped != nullptr) dropped->resize(others + 1);
  SparseEntry* to = entries.data();
  SparseEntry* rest = dropped != nullptr ? dropped->data() : &nowhere;
  const std::ptrdiff_t next_of_rest = dropped != nullptr ? 1 : 0;
  for (const SparseEntry each : entries) {  // without a branch, which nobody could predict
    const std::uint32_t bits = magnitude_bits(each.value);
    const bool is_kth = bits == kth.magnitude && equal > 0;
    const bool is_kept = bits > kth.magnitude || is_kth;
    equal -= is_kth ? 1 : 0;
    *to = each;
    *rest = each;
    to += is_kept ? 1 : 0;
    rest += is_kept ? 0 : next_of_rest;
  }
  entries.resize(k);
  if (dropped != nullptr) dropped->resize(others);
}

Entries take_largest(const float* gradient, const float* residual, float* left, std::int64_t elements,
                     std::int64_t k) {
  k = std::min(k, elements);
  if (k == 0) return {};
  const auto wanted = static_cast<std::size_t>(k);
  const std::uint32_t threshold = sampled_threshold(gradient, residual, elements, k);
  Entries entries;
  const bool collected = add_and_collect(gradient, residual, left, elements, threshold,
                                         4 * wanted + static_cast<std::size_t>(kSamples), entries);
  if (!collected || (entries.size() < wanted && threshold > kLeast)) {
    entries = largest_by_counts(left, elements, k);
  } else if (entries.size() > wanted) {
    keep_largest(entries, wanted);
  }
  bool finite = true;
  for (const SparseEntry& entry : entries) {
    left[entry.index] = 0;
    finite = finite && std::isfinite(entry.value);
  }
  if (!finite) {  // there may be more than `k`, which are the largest
    for (std::int64_t i = 0; i < elements; ++i) left[i] = std::isfinite(left[i]) ? left[i] : 0;
  }
  return entries;
}

}  // namespace reef::kernels
