#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace reef::kernels::cuda {

/// Hashes memory on a device: 64 bits that depend on every byte and on its place. `data` is aligned to 16
/// bytes and not empty. Everything runs on `stream` of the current device, and the host does not wait.

inline constexpr int kHashBlocks = 256;  ///< at most

/// What the kernels need on the device. It must be zero at first, and is used by one stream.
struct PageHashScratch {
  unsigned long long sums[kHashBlocks];  ///< of each block
  unsigned long long hash;
  unsigned done;     ///< blocks, while the kernel runs
  unsigned changed;  ///< whether the hash was another than the one that was noted
};

/// Sets scratch->hash.
cudaError_t hash_page(const void* data, std::uint64_t bytes, PageHashScratch* scratch, cudaStream_t stream);

/// Sets *noted, which may be page-locked memory, to the hash.
cudaError_t note_page_hash(const void* data, std::uint64_t bytes, unsigned long long* noted,
                           PageHashScratch* scratch, cudaStream_t stream);

/// If the hash is not *noted, copies the bytes to `copy`, notes the hash and adds 1 to *written. `copy`
/// (aligned to 16 bytes) and `noted` may be page-locked memory, `written` is on the device.
cudaError_t write_page_if_changed(const void* data, std::uint64_t bytes, void* copy,
                                  unsigned long long* noted, PageHashScratch* scratch,
                                  unsigned long long* written, cudaStream_t stream);

}  // namespace reef::kernels::cuda
