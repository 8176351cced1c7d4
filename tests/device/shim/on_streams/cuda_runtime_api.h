// Includes CUDA's own declarations. A launch enqueues the kernel on a stream of a played device
// (device/runtime/).
#pragma once

#include_next <cuda_runtime_api.h>
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#include <names.h>

#include <tuple>
#include <type_traits>

#include "device/runtime/played_cuda.h"

namespace reef::played {

/// Enqueues a kernel on the stream, with copies of its arguments.
template <class... Parameters, class... Given>
void launch(void (*kernel)(Parameters...), std::int64_t blocks, std::int64_t threads, cudaStream_t stream,
            const Given&... given) {
  enqueue(stream, Work::kKernel, [=, arguments = std::tuple<std::remove_const_t<Parameters>...>(given...)] {
    run_kernel(stream, [&] {
      run_grid(static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
               [&] { std::apply(kernel, arguments); });
    });
  });
}

}  // namespace reef::played

#define REEF_LAUNCH(kernel, blocks, threads, stream, ...) \
  ::reef::played::launch(kernel, blocks, threads, stream, __VA_ARGS__)
