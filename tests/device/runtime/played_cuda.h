// A CUDA runtime that is played: preloaded, it has the functions of libcudart, so LibTorch's CUDA libraries
// and Reef's CUDA sources run on it unmodified, on a machine without a GPU. A stream is a thread that does
// its work in order, beside the program. Device memory is host memory that only the work of streams reaches.
// What a device would compute is given by those who know it: played operators, played kernels, a played NCCL.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace reef::played {

inline constexpr int kDevices = 2;

enum class Work : std::uint8_t { kKernel, kCopy, kCommunication };

/// Gives the stream work, behind what it has been given before. While the stream is captured, the work
/// becomes a part of the graph instead, so it may run many times, or never. What it throws breaks the device,
/// as a failed assertion in a kernel does.
void enqueue(cudaStream_t stream, Work kind, std::function<void()> work);

/// Waits for all that the stream has been given.
void finish(cudaStream_t stream);

/// Returns the address at which the work of streams reaches device memory that the program knows as
/// `address`, or the same address if it is none of a device. The program itself can neither read nor write
/// there.
void* reach(const void* address);

/// Lets one kernel at a time run, and opens the device's memory at the addresses that kernels are given, for
/// as long as it runs.
void run_kernel(cudaStream_t stream, const std::function<void()>& kernel);

}  // namespace reef::played

// What tests ask for, by C names for Python's ctypes.
extern "C" {
/// Lets streams wait before each work of this kind, up to twice as long as `mean_us`, drawn from the seed.
void played_cuda_delay(int kind, unsigned mean_us);
/// Lets one stream wait before each of its works, for exactly so long.
void played_cuda_delay_stream(cudaStream_t stream, unsigned microseconds);
void played_cuda_seed(std::uint64_t seed);
/// Sets the bytes of each device (4 GiB in the beginning).
void played_cuda_set_memory_bytes(std::size_t bytes);
/// Lets `succeed` allocations of device memory succeed, and then `fail` of them fail.
void played_cuda_fail_allocations(int succeed, int fail);
/// The same of page-locked memory.
void played_cuda_fail_host_allocations(int succeed, int fail);
/// Breaks a device: from now on each call that concerns it returns this error, as after a fault in a kernel.
void played_cuda_break(int device, cudaError_t error);
/// An allocator to plug into LibTorch (torch.cuda.memory.CUDAPluggableAllocator).
void* played_cuda_plugged_allocate(std::ptrdiff_t bytes, int device, cudaStream_t stream);
void played_cuda_plugged_free(void* data, std::ptrdiff_t bytes, int device, cudaStream_t stream);
/// Returns how many bytes of page-locked memory there are.
std::size_t played_cuda_host_bytes();
/// Returns how often the program has waited for a stream, an event or a device.
std::uint64_t played_cuda_host_waits();
}
