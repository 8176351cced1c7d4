#include "kernels/cuda/count_nonfinite.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace reef::kernels::cuda {

std::int64_t count_nonfinite(const at::Tensor& tensor, FloatFormat format) {
  const c10::cuda::CUDAGuard guard(tensor.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  unsigned long long found = 0;
  const c10::DataPtr counter = c10::cuda::CUDACachingAllocator::get()->allocate(sizeof found);
  C10_CUDA_CHECK(count_nonfinite(tensor.const_data_ptr(), tensor.numel(), format,
                                 static_cast<unsigned long long*>(counter.get()), stream));
  c10::cuda::memcpy_and_sync(&found, counter.get(), sizeof found, cudaMemcpyDeviceToHost, stream);
  return static_cast<std::int64_t>(found);
}

}  // namespace reef::kernels::cuda
