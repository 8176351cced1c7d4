#pragma once

#include <cstdint>
#include <vector>

#include "kernels/lane.h"

namespace at {
class Tensor;
}  // namespace at

namespace reef::kernels {

/// An element of a vector that is zero elsewhere. 8 bytes, as it travels.
struct SparseEntry {
  std::uint32_t index;
  float value;
  bool operator==(const SparseEntry&) const = default;
};
static_assert(sizeof(SparseEntry) == 8);

/// What sparse entries are ordered by: magnitude, NaN above infinity, and of equal ones the lower index
/// first.
REEF_LANE std::uint32_t magnitude_bits(float value) {
  return __builtin_bit_cast(std::uint32_t, value) & 0x7FFFFFFFU;
}
inline bool is_larger(const SparseEntry& a, const SparseEntry& b) {
  const std::uint32_t of_a = magnitude_bits(a.value), of_b = magnitude_bits(b.value);
  return of_a != of_b ? of_a > of_b : a.index < b.index;
}

/// Splits entries into the `k` largest by is_larger() and the others, which go to `dropped` if that is not
/// nullptr. Entries are in the order of their indices, and so are both parts: no sort, but one count of the
/// magnitudes' high bits, a selection among those that share them with the k-th, and one pass.
void keep_largest(std::vector<SparseEntry>& entries, std::size_t k,
                  std::vector<SparseEntry>* dropped = nullptr);

/// Adds `gradient` and `residual` (nullptr: zeros) to `left`, takes the `k` largest of the sums out, and
/// gives them in the order of their indices; those that are zero are no entries. In `left` they are 0, as all
/// sums that are not finite. Exact: the entries are those that a sort by is_larger() would have first. `left`
/// may be `gradient`. At most 2^32 - 1 elements; `k` from 1.
///
/// One pass over memory: a threshold from a sample lets a few more than `k` through, among which the largest
/// are chosen. Where the sample misleads (many equal magnitudes, say), two counts of their bits over `left`
/// give the threshold itself. Memory: some k entries.
std::vector<SparseEntry> take_largest(const float* gradient, const float* residual, float* left,
                                      std::int64_t elements, std::int64_t k);

namespace cuda {
/// The same of tensors on CUDA, float32 and without gaps; an undefined residual stands for zeros. Waits for
/// the current stream, since the entries come to the host. What a sum with a NaN has as its bits is the
/// device's. A build without CUDA throws ConfigError.
std::vector<SparseEntry> take_largest(const at::Tensor& gradient, const at::Tensor& residual,
                                      const at::Tensor& left, std::int64_t k);
}  // namespace cuda

}  // namespace reef::kernels
