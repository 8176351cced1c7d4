#pragma once

#include <atomic>

#include "kernels/lane.h"

namespace reef::kernels {

/// Makes a number, not negative, at least x, while others do the same. The largest comes out in any order.
REEF_LANE void raise_to(float* number, float x) {
#ifdef __CUDA_ARCH__
  if (*number < x) atomicMax(reinterpret_cast<unsigned*>(number), __float_as_uint(x));
#else
  const std::atomic_ref<float> shared(*number);
  float found = shared.load(std::memory_order_relaxed);
  while (found < x && !shared.compare_exchange_weak(found, x, std::memory_order_relaxed)) {
  }
#endif
}

}  // namespace reef::kernels
