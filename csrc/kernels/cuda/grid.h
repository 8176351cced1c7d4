#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace reef::kernels::cuda {

/// Sets `blocks` to the number of blocks of `threads` threads that can be resident on the current device at
/// once, or to `wanted` if that is fewer, but to at least 1.
inline cudaError_t grid_for(const void* kernel, int threads, std::int64_t wanted, int& blocks) {
  int device = 0;
  int processors = 0;
  int per_processor = 0;
  if (const cudaError_t error = cudaGetDevice(&device)) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) {
    return error;
  }
  if (const cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, 0)) {
    return error;
  }
  const std::int64_t most = std::int64_t{processors} * per_processor;
  blocks = static_cast<int>(std::clamp(wanted, std::int64_t{1}, std::max(most, std::int64_t{1})));
  return cudaSuccess;
}

}  // namespace reef::kernels::cuda
