// Defines the names of CUDA that kernels use, on top of the played device (device/played_grid.h).
#pragma once

#include <cstddef>
#include <cstring>

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
inline void __threadfence() {}
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
