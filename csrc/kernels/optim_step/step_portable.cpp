#include "kernels/optim_step/lanes_scalar.h"
#include "kernels/optim_step/levels.h"
#include "kernels/optim_step/tiles.h"

namespace reef::kernels {

const OptimKernels& portable_kernels() {
  static const OptimKernels kernels = all_kernels<scalar::Lanes>();
  return kernels;
}

}  // namespace reef::kernels
