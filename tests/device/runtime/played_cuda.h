// An emulated ("played") CUDA runtime. When it is preloaded, it provides the functions of libcudart, so that
// LibTorch's CUDA libraries and Reef's CUDA sources run on it unmodified, on a machine without a GPU. A
// stream is a thread that does its work in order, asynchronously to the program. Device memory is host memory
// that only the work of streams can access. What a device would compute is enqueued as work by played
// operators (operators.cpp), played kernels (../played_grid.h) and played NCCL (nccl.cpp).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace reef::played {

inline constexpr int kDevices = 2;

enum class Work : std::uint8_t { kKernel, kCopy, kCommunication };

/// Enqueues work on the stream. While the stream is captured, the work becomes a part of the graph instead,
/// so it may run many times, or never. If the work throws, the device is broken, as by a failed assertion in
/// a kernel.
void enqueue(cudaStream_t stream, Work kind, std::function<void()> work);

/// Waits for all work on the stream.
void finish(cudaStream_t stream);

/// Returns the address at which the work of streams can access the device memory that the program knows as
/// `address`. Returns `address` itself if it is not in device memory. At `address`, the program can neither
/// read nor write device memory.
void* reach(const void* address);

/// Runs a kernel; only one runs at a time. While it runs, device memory is accessible at the addresses that
/// the program passes to kernels.
void run_kernel(cudaStream_t stream, const std::function<void()>& kernel);

}  // namespace reef::played

// Controls for tests, with C names for Python's ctypes.
extern "C" {
/// Delays every work of this kind by a random time from 0 to 2 * `mean_us` microseconds, drawn with the seed.
void played_cuda_delay(int kind, unsigned mean_us);
/// Delays every work of one stream by exactly `microseconds`.
void played_cuda_delay_stream(cudaStream_t stream, unsigned microseconds);
void played_cuda_seed(std::uint64_t seed);
/// Lets `succeed` allocations of device memory succeed, and then `fail` of them fail.
void played_cuda_fail_allocations(int succeed, int fail);
/// Does the same for page-locked memory.
void played_cuda_fail_host_allocations(int succeed, int fail);
/// Breaks a device: from now on each call that concerns it returns this error, as after a fault in a kernel.
void played_cuda_break(int device, cudaError_t error);
/// The functions of an allocator for torch.cuda.memory.CUDAPluggableAllocator.
void* played_cuda_plugged_allocate(std::ptrdiff_t bytes, int device, cudaStream_t stream);
void played_cuda_plugged_free(void* data, std::ptrdiff_t bytes, int device, cudaStream_t stream);
/// Returns how many bytes of page-locked memory are allocated.
std::size_t played_cuda_host_bytes();
/// Returns how often the program has waited for a stream, an event or a device.
std::uint64_t played_cuda_host_waits();
}
