#include "kernels/optim_step/levels.h"

namespace reef::kernels {

bool has_level(OptimLevel level) { return level == OptimLevel::kPortable; }

const OptimKernels* optim_kernels(OptimLevel level) {
  return has_level(level) ? &portable_kernels() : nullptr;
}

}  // namespace reef::kernels
