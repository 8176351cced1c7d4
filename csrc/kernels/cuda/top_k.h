#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "kernels/top_k.h"
#include "kernels/top_k/warp.h"

namespace reef::kernels::cuda {

/// The index of an entry that has not been written, where fewer than k elements are not zero.
inline constexpr std::uint32_t kNoIndex = std::numeric_limits<std::uint32_t>::max();

/// kernels::take_largest(), of memory on the device: `k`, from 1, of `elements`, at least as many, into
/// `entries`, of which the last have kNoIndex if fewer than k are not zero. Runs on `stream` of the current
/// device and does not wait.
cudaError_t take_largest(const float* gradient, const float* residual, float* left, std::int64_t elements,
                         std::uint32_t k, SparseEntry* entries, top_k::Scratch* scratch, cudaStream_t stream);

}  // namespace reef::kernels::cuda
