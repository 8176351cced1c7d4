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
/// device memory for each stream, from cudaMalloc and not from LibTorch's allocator. Callers make the device
/// the current one. Throws c10::Error. Thread-safe: kernels that belong together are launched under a lock.
class CudaPageHash {
 public:
  CudaPageHash() = default;
  CudaPageHash(const CudaPageHash&) = delete;
  CudaPageHash& operator=(const CudaPageHash&) = delete;
  ~CudaPageHash();

  /// Allocates what all streams of LibTorch's pools need, so that a lack of memory shows before a budget
  /// begins.
  void reserve();

  /// Bytes behind a page's own in its slot, where the device notes the hash of what the slot holds.
  static constexpr std::uint64_t kNoteBytes = 8;

  /// Notes in `slot` the hash of the `bytes` bytes at `data`, which the caller copies there next.
  void note(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream);
  /// Writes the slot again if the hash of the memory is not the one that is noted there.
  void write_if_changed(const void* data, std::uint64_t bytes, void* slot, cudaStream_t stream);
  /// Returns how many slots have been written again, up to the work that the device has finished.
  std::uint64_t written() const;
  /// Returns the hash. Waits for the stream.
  std::uint64_t of(const void* data, std::uint64_t bytes, cudaStream_t stream);

 private:
  void take_room();
  kernels::cuda::PageHashScratch* scratch_of(cudaStream_t stream);

  mutable std::mutex mutex_;
  std::vector<void*> rooms_;  ///< blocks of device memory, each for many streams
  std::size_t left_ = 0;      ///< how many more streams the last block has room for
  std::unordered_map<cudaStream_t, kernels::cuda::PageHashScratch*> scratch_;
  unsigned long long* written_ = nullptr;
};

}  // namespace reef
