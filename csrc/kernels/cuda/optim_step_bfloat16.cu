#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_bfloat16() {
  static const OptimCudaKernels kernels = all_kernels<warp::BFloat16State, OptimFormat::kBFloat16>();
  return kernels;
}

}  // namespace reef::kernels::cuda
