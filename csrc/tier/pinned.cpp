#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>

#include "reef/error.h"
#include "reef/tier.h"
#include "tier/arena.h"

namespace reef {

std::shared_ptr<Tier> pinned_tier(std::uint64_t capacity_bytes) {
  if (c10::cuda::device_count() == 0) {
    throw ConfigError("there is no CUDA device here to copy from page-locked memory; give a host_tier");
  }
  const auto allocate = [](std::size_t bytes) {
    void* data = nullptr;
    if (cudaHostAlloc(&data, bytes, cudaHostAllocPortable) == cudaSuccess) return data;
    (void)cudaGetLastError();  // no more of it: the next tier is asked
    return static_cast<void*>(nullptr);
  };
  return arena_tier({.name = "pinned", .capacity_bytes = capacity_bytes},
                    {allocate, [](void* data) { (void)cudaFreeHost(data); }});
}

}  // namespace reef
