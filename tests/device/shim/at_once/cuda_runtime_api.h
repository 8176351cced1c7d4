// Declares the functions of CUDA that launches use. A launch runs the kernel and returns when it has ended.
#pragma once

#include <names.h>

#include <cstddef>
#include <cstring>
#include <tuple>
#include <type_traits>

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

/// Runs a kernel with copies of its arguments, and returns when it has ended.
template <class... Parameters, class... Given>
void launch(void (*kernel)(Parameters...), std::int64_t blocks, std::int64_t threads, const Given&... given) {
  const std::tuple<std::remove_const_t<Parameters>...> arguments(given...);
  run_grid(static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
           [&] { std::apply(kernel, arguments); });
}

}  // namespace reef::played

#define REEF_LAUNCH(kernel, blocks, threads, stream, ...) \
  (static_cast<void>(stream), ::reef::played::launch(kernel, blocks, threads, __VA_ARGS__))
