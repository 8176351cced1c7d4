// The arithmetic of played reductions: element by element, in the order of the ranks, and every operation
// rounds to the type of the elements. So every rank gets the same bytes, in whatever order the ranks arrive.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <vector>

namespace reef::played {

struct Reduction {
  ncclRedOp_t op = ncclSum;             // kMultipliedSum for operations made by ncclRedOpCreatePreMulSum.
  std::array<char, 8> factor{};         // The factor of kMultipliedSum.
  const void* device_factor = nullptr;  // If not null, is read instead of `factor` when the reduction runs.
};
inline constexpr auto kMultipliedSum = ncclNumOps;

/// Returns the size of an element in bytes, or 0 if there is no such type.
std::size_t bytes_of(ncclDataType_t type);
/// Whether elements of this type can be reduced and not only moved.
bool is_reduced(ncclDataType_t type);

/// Multiplies this rank's elements by the reduction's factor, if it has one. Like NCCL, averages floating
/// point numbers by multiplying them by one over the number of ranks before the sum.
void prepare(const Reduction& reduction, ncclDataType_t type, int ranks, char* elements, std::size_t count);
/// Combines `inputs`, one prepared input from each rank.
void combine(const Reduction& reduction, ncclDataType_t type, const std::vector<const char*>& inputs,
             char* output, std::size_t count);

}  // namespace reef::played
