#pragma once

#include <cstdint>
#include <vector>

#include "kernels/top_k.h"

namespace reef::kernels {

/// Runs take_largest() as the CUDA kernels do, thread by thread; only the launch and the exchange between
/// threads are the test's. The vector has so many parts, at most one for each tile and kMostParts, whose
/// warps run in an order that `seed` chooses.
std::vector<SparseEntry> take_largest_by_warps(const float* gradient, const float* residual, float* left,
                                               std::int64_t elements, std::int64_t k, std::int64_t parts,
                                               std::uint64_t seed);

}  // namespace reef::kernels
