#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_int8_compensated() {
  static const OptimCudaKernels kernels =
      all_kernels<warp::Int8CompensatedState, OptimFormat::kInt8Compensated>();
  return kernels;
}

}  // namespace reef::kernels::cuda
