#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_float32() {
  static const OptimCudaKernels kernels = all_kernels<warp::Float32State, OptimFormat::kFloat32>();
  return kernels;
}

}  // namespace reef::kernels::cuda
