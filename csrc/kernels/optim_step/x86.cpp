#include "kernels/optim_step/levels.h"
#include "kernels/optim_step/prefetch.h"

namespace reef::kernels {

const std::uintptr_t prefetch_bytes = [] {
  __builtin_cpu_init();  // This may run before the library's own constructors.
  return __builtin_cpu_is("amd") ? 256 : 2048;
}();

bool has_level(OptimLevel level) {
  switch (level) {
    case OptimLevel::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case OptimLevel::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case OptimLevel::kPortable:
      break;
  }
  return true;
}

const OptimKernels* optim_kernels(OptimLevel level) {
  if (!has_level(level)) return nullptr;
  switch (level) {
    case OptimLevel::kAvx512:
      return &avx512_kernels();
    case OptimLevel::kAvx2:
      return &avx2_kernels();
    case OptimLevel::kPortable:
      break;
  }
  return &portable_kernels();
}

}  // namespace reef::kernels
