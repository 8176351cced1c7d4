#include "kernels/optim_step/lanes_avx2.h"
#include "kernels/optim_step/levels.h"
#include "kernels/optim_step/tiles.h"

namespace reef::kernels {

const OptimKernels& avx2_kernels() {
  static const OptimKernels kernels = all_kernels<avx2::Lanes>();
  return kernels;
}

}  // namespace reef::kernels
