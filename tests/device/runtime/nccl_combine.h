// The arithmetic of played reductions: element by element, in the order of the ranks, and every operation
// rounds to the type of the elements. So every rank gets the same bytes, whoever came first.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <vector>

namespace reef::played {

struct Reduction {
  ncclRedOp_t op = ncclSum;             // kMultipliedSum: of a handle that ncclRedOpCreatePreMulSum made
  std::array<char, 8> factor{};         // of kMultipliedSum
  const void* device_factor = nullptr;  // read when the reduction runs, instead of `factor`
};
inline constexpr auto kMultipliedSum = ncclNumOps;

/// Bytes of an element, 0 if there is no such type.
std::size_t bytes_of(ncclDataType_t type);
/// Types that can only be moved are not reduced.
bool is_reduced(ncclDataType_t type);

/// Multiplies this rank's elements by the factor that the reduction has for them, if it has one. NCCL's
/// average of floating point numbers is a sum of elements that were multiplied by one over the number of
/// ranks.
void prepare(const Reduction& reduction, ncclDataType_t type, int ranks, char* elements, std::size_t count);
/// Combines `inputs`, which were prepared, one of each rank.
void combine(const Reduction& reduction, ncclDataType_t type, const std::vector<const char*>& inputs,
             char* output, std::size_t count);

}  // namespace reef::played
