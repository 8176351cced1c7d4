#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_companded8_compensated() {
  static const OptimCudaKernels kernels =
      all_kernels<warp::Companded8CompensatedState, OptimFormat::kCompanded8Compensated>();
  return kernels;
}

}  // namespace reef::kernels::cuda
