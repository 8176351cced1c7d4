#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_int8() {
  static const OptimCudaKernels kernels = all_kernels<warp::Int8State, OptimFormat::kInt8>();
  return kernels;
}

}  // namespace reef::kernels::cuda
