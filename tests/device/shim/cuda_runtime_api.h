// Declares under CUDA's names what the kernels and their launches use, and plays it on the CPU
// (device/played_grid.h).
#pragma once

#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "device/played_grid.h"

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (::reef::played::thread_index)
#define blockIdx (::reef::played::block_index)
#define gridDim (::reef::played::grid_size)
#define blockDim (::reef::played::block_size)

inline void __syncthreads() { reef::played::meet_block(); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
template <class Number>
Number atomicAdd(Number* to, Number value) {
  const Number before = *to;
  *to += value;
  return before;
}
inline unsigned atomicMax(unsigned* to, unsigned value) {
  const unsigned before = *to;
  if (value > before) *to = value;
  return before;
}

enum cudaError_t { cudaSuccess = 0 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = struct PlayedStream*;

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 3;
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
  *blocks = 1;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

namespace reef::played {

/// Runs a kernel to its end, with copies of its arguments.
template <class... Parameters, class... Given>
void launch(void (*kernel)(Parameters...), std::int64_t blocks, std::int64_t threads, const Given&... given) {
  const std::tuple<std::remove_const_t<Parameters>...> arguments(given...);
  run_grid(static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
           [&] { std::apply(kernel, arguments); });
}

}  // namespace reef::played

#define REEF_LAUNCH(kernel, blocks, threads, stream, ...) \
  (static_cast<void>(stream), ::reef::played::launch(kernel, blocks, threads, __VA_ARGS__))
