#include "kernels/cuda/count_nonfinite.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <numeric>

namespace reef::kernels::cuda {

std::int64_t count_nonfinite(const std::vector<at::Tensor>& tensors) {
  const c10::cuda::CUDAGuard guard(tensors.front().device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const auto count = static_cast<std::int64_t>(tensors.size());
  const auto bytes = count * static_cast<std::int64_t>(sizeof(unsigned long long));
  const c10::DataPtr counters =
      c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<std::size_t>(bytes));
  auto* counter = static_cast<unsigned long long*>(counters.get());
  for (const at::Tensor& tensor : tensors) {
    C10_CUDA_CHECK(
        count_nonfinite(tensor.const_data_ptr(), tensor.numel(), *float_format(tensor), counter++, stream));
  }
  const at::Tensor found = at::empty({count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  c10::cuda::memcpy_and_sync(found.mutable_data_ptr(), counters.get(), bytes, cudaMemcpyDeviceToHost, stream);
  const auto* const first = found.const_data_ptr<std::int64_t>();
  return std::accumulate(first, first + count, std::int64_t{0});
}

}  // namespace reef::kernels::cuda
