#include "kernels/cuda/optim_step.cuh"

namespace reef::kernels::cuda {

const OptimCudaKernels& optim_int4() {
  static const OptimCudaKernels kernels = all_kernels<warp::Int4State, OptimFormat::kInt4>();
  return kernels;
}

}  // namespace reef::kernels::cuda
