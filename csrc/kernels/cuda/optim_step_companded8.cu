#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_companded8() {
  static const OptimCudaKernels kernels = all_kernels<warp::Companded8State, OptimFormat::kCompanded8>();
  return kernels;
}

}  // namespace reef::kernels::cuda
