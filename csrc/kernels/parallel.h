#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

namespace reef::kernels {

/// Calls `work(begin, end)` for parts of [begin, end), none smaller than `grain` if there are several, on
/// LibTorch's own threads. `work` must not throw. at::parallel_for is a template whose threads come from
/// -fopenmp where it is compiled: without that it stays on the calling thread.
template <class Work>
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain, const Work& work) {
  torch_parallel_for(
      begin, end, grain,
      [](std::int64_t first, std::int64_t last, void* context) {
        (*static_cast<const Work*>(context))(first, last);
      },
      const_cast<Work*>(&work));
}

}  // namespace reef::kernels
