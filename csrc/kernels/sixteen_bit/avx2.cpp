#include "kernels/sixteen_bit/all_loops.h"

namespace reef::kernels {

const SixteenBitKernels* sixteen_bit_kernels_with_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &kSixteenBit : nullptr;
}

}  // namespace reef::kernels
