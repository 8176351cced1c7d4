#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "kernels/top_k.h"
#include "kernels/top_k/warp.h"

namespace reef::kernels::cuda {

/// The index of an entry that is not used, because fewer than k elements are nonzero.
inline constexpr std::uint32_t kNoIndex = std::numeric_limits<std::uint32_t>::max();

/// Does what kernels::take_largest() does, in device memory: writes the `k` largest elements to `entries`,
/// where 1 <= k <= elements. If fewer than k elements are nonzero, the last entries have the index kNoIndex.
/// Runs on `stream` of the current device and does not synchronize.
cudaError_t take_largest(const float* gradient, const float* residual, float* left, std::int64_t elements,
                         std::uint32_t k, SparseEntry* entries, top_k::Scratch* scratch, cudaStream_t stream);

}  // namespace reef::kernels::cuda
