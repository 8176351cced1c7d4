#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_int4_compensated() {
  static const OptimCudaKernels kernels =
      all_kernels<warp::Int4CompensatedState, OptimFormat::kInt4Compensated>();
  return kernels;
}

}  // namespace reef::kernels::cuda
