#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace reef::kernels::cuda {

/// Hashes of memory on a device, and what follows from them, without the host: 64 bits that depend on every
/// byte and on its place. `data` is aligned to 16 bytes and not empty. Everything runs on `stream` of the
/// current device, and does not wait. `sums`, on the device, has room for kHashSums numbers, and is used by
/// one stream.

inline constexpr int kHashSums = 256;

/// Sets the first numbers of `sums`; returns how many in `count`. Their sum modulo 2^64 is the hash.
cudaError_t hash_page(const void* data, std::uint64_t bytes, unsigned long long* sums, int& count,
                      cudaStream_t stream);

/// Sets *noted, which may be page-locked memory, to the hash.
cudaError_t note_page_hash(const void* data, std::uint64_t bytes, unsigned long long* noted,
                           unsigned long long* sums, cudaStream_t stream);

/// If the hash is not *noted, copies the bytes to `copy`, notes the hash and adds 1 to *written. `copy`
/// (aligned to 16 bytes) and `noted` may be page-locked memory, `written` is on the device.
cudaError_t write_page_if_changed(const void* data, std::uint64_t bytes, void* copy,
                                  unsigned long long* noted, unsigned long long* sums,
                                  unsigned long long* written, cudaStream_t stream);

}  // namespace reef::kernels::cuda
