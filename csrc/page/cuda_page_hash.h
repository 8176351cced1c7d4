#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace reef {
namespace kernels::cuda {
struct PageHashScratch;
}  // namespace kernels::cuda

/// Lets one device hash its memory (kernels/cuda/page_hash.h), in the order of a stream. Takes 2 KiB of
/// device memory for each stream, from cudaMalloc and not from LibTorch's allocator. The device is the
/// current one. Throws c10::Error. Thread-safe: what it gives to a stream is not mixed with what another
/// thread gives to it.
class CudaPageHash {
 public:
  CudaPageHash() = default;
  CudaPageHash(const CudaPageHash&) = delete;
  CudaPageHash& operator=(const CudaPageHash&) = delete;
  ~CudaPageHash();

  /// Takes room for as many streams as LibTorch has, so that nothing is allocated later.
  void reserve();

  /// Bytes behind a page's own in a slot that the device can reach: where the hash of what it holds is noted.
  static constexpr std::uint64_t kNoteBytes = 8;

  /// Notes the hash of the memory behind `bytes` bytes at `slot`, which are to be copied from there.
  void note(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream);
  /// Writes the slot again if the memory has another hash by now.
  void write_if_changed(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream);
  /// How often that has been so, as far as the device has got.
  std::uint64_t written() const;
  /// Returns the hash. Waits for the stream.
  std::uint64_t of(const void* data, std::uint64_t bytes, cudaStream_t stream);

 private:
  void take_room();
  kernels::cuda::PageHashScratch* scratch_of(cudaStream_t stream);

  mutable std::mutex mutex_;
  std::vector<void*> rooms_;  ///< of the device
  std::size_t left_ = 0;      ///< streams for which the last one has room
  std::unordered_map<cudaStream_t, kernels::cuda::PageHashScratch*> scratch_;
  unsigned long long* written_ = nullptr;
};

}  // namespace reef
