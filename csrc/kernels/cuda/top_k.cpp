#include "kernels/cuda/top_k.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>

namespace reef::kernels::cuda {

std::vector<SparseEntry> take_largest(const at::Tensor& gradient, const at::Tensor& residual,
                                      const at::Tensor& left, std::int64_t k) {
  const std::int64_t elements = gradient.numel();
  std::vector<SparseEntry> taken(static_cast<std::size_t>(std::min(k, elements)));
  if (taken.empty()) return taken;
  const c10::cuda::CUDAGuard guard(gradient.device());
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  auto* const allocator = c10::cuda::CUDACachingAllocator::get();
  const std::size_t bytes = taken.size() * sizeof(SparseEntry);
  const c10::DataPtr entries = allocator->allocate(bytes);
  const c10::DataPtr scratch = allocator->allocate(sizeof(top_k::Scratch));
  C10_CUDA_CHECK(take_largest(
      gradient.const_data_ptr<float>(), residual.defined() ? residual.const_data_ptr<float>() : nullptr,
      left.mutable_data_ptr<float>(), elements, static_cast<std::uint32_t>(taken.size()),
      static_cast<SparseEntry*>(entries.get()), static_cast<top_k::Scratch*>(scratch.get()), stream));
  const at::Tensor read =
      at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  c10::cuda::memcpy_and_sync(read.mutable_data_ptr(), entries.get(), static_cast<std::int64_t>(bytes),
                             cudaMemcpyDeviceToHost, stream);
  std::memcpy(taken.data(), read.const_data_ptr(), bytes);
  const auto is_none = [](const SparseEntry& each) { return each.index == kNoIndex; };
  taken.erase(std::find_if(taken.begin(), taken.end(), is_none), taken.end());
  return taken;
}

}  // namespace reef::kernels::cuda
