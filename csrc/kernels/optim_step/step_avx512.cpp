#include "kernels/optim_step/lanes_avx512.h"
#include "kernels/optim_step/levels.h"
#include "kernels/optim_step/tiles.h"

namespace reef::kernels {

const OptimKernels& avx512_kernels() {
  static const OptimKernels kernels = all_kernels<avx512::Lanes>();
  return kernels;
}

}  // namespace reef::kernels
