#include "kernels/optim_step/levels.h"
#include "kernels/optim_step/prefetch.h"

namespace reef::kernels {

const std::uintptr_t prefetch_bytes = 0;

bool has_level(OptimLevel level) { return level == OptimLevel::kPortable; }

const OptimKernels* optim_kernels(OptimLevel level) {
  return has_level(level) ? &portable_kernels() : nullptr;
}

}  // namespace reef::kernels
