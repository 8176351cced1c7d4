#include "kernels/cuda/page_hash.h"

#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "kernels/cuda/launch.h"
#include "kernels/lane.h"

namespace reef::kernels::cuda {
namespace {

using Word = unsigned long long;

constexpr int kThreads = 128;
constexpr std::uint64_t kVectorsOfThread = 128;  ///< fewer are not worth another block

struct alignas(16) Vector {
  Word of[2];
};

/// Mixes a word and its place into 64 bits (the finalizer of Pelle Evensen's rrmxmx family).
__device__ Word mix(Word word, Word place) {
  constexpr Word kOdd = 0x9FB21C651E98DF25;
  Word bits = word ^ (place + 1) * 0x9E3779B97F4A7C15;
  bits ^= bits >> 32;
  bits *= kOdd;
  bits ^= bits >> 29;
  bits *= kOdd;
  return bits ^ bits >> 28;
}

using Reduce = cub::BlockReduce<Word, kThreads>;

/// Returns the sum over the vectors that this thread takes; thread 0 of the grid also takes the bytes behind
/// the last whole vector, padded with zeros.
__device__ Word sum_of_thread(const unsigned char* data, std::uint64_t bytes) {
  const std::uint64_t thread = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t vectors = bytes / sizeof(Vector);
  const auto* const whole = reinterpret_cast<const Vector*>(data);
  Word sum = 0;
  _Pragma("unroll 4") for (std::uint64_t i = thread; i < vectors; i += threads) {
    const Vector vector = whole[i];
    sum += mix(vector.of[0], 2 * i) + mix(vector.of[1], 2 * i + 1);
  }
  if (thread == 0 && vectors * sizeof(Vector) < bytes) {
    Word low = 0, high = 0;  // Not an array, which would be in local memory.
    for (std::uint64_t i = vectors * sizeof(Vector); i < bytes; ++i)
      (i % sizeof(Vector) < sizeof(Word) ? low : high) |= Word{data[i]} << 8 * (i % sizeof(Word));
    sum += mix(low, 2 * vectors) + mix(high, 2 * vectors + 1);
  }
  return sum;
}

/// Compares the hash with the one that was noted, if `written` is given, and notes it, if `noted` is.
__device__ void conclude(Word hash, PageHashScratch& scratch, Word* noted, Word* written) {
  scratch.done = 0;
  scratch.hash = hash;
  if (noted == nullptr) return;
  scratch.changed = *noted != hash;
  if (written != nullptr && scratch.changed != 0) atomicAdd(written, Word{1});
  *noted = hash;
}

/// The last block to finish adds up what all have found.
__global__ void __launch_bounds__(kThreads)
    hash_kernel(const unsigned char* data, std::uint64_t bytes, PageHashScratch* scratch, Word* noted,
                Word* written) {
  __shared__ typename Reduce::TempStorage of_threads, of_blocks;
  __shared__ bool is_last;
  const Word in_block = Reduce(of_threads).Sum(sum_of_thread(data, bytes));
  if (gridDim.x == 1) {
    if (threadIdx.x == 0) conclude(in_block, *scratch, noted, written);
    return;
  }
  if (threadIdx.x == 0) {
    scratch->sums[blockIdx.x] = in_block;
    __threadfence();  // The sum is there before the block counts as done.
    is_last = atomicAdd(&scratch->done, 1U) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  Word sum = 0;
  const volatile Word* const sums = scratch->sums;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) sum += sums[i];
  const Word hash = Reduce(of_blocks).Sum(sum);
  if (threadIdx.x == 0) conclude(hash, *scratch, noted, written);
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const unsigned char* data, std::uint64_t bytes,
                                                        const PageHashScratch* scratch, unsigned char* copy) {
  if (scratch->changed == 0) return;
  const std::uint64_t thread = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t vectors = bytes / sizeof(Vector);
  const auto* const from = reinterpret_cast<const Vector*>(data);
  auto* const to = reinterpret_cast<Vector*>(copy);
  for (std::uint64_t i = thread; i < vectors; i += threads) to[i] = from[i];
  const std::uint64_t rest = vectors * sizeof(Vector) + thread;
  if (rest < bytes) copy[rest] = data[rest];
}

int blocks_for(std::uint64_t bytes) {
  constexpr std::uint64_t kBytesOfBlock = kThreads * kVectorsOfThread * sizeof(Vector);
  return static_cast<int>(std::min<std::uint64_t>((bytes + kBytesOfBlock - 1) / kBytesOfBlock, kHashBlocks));
}

cudaError_t launch_hash(const void* data, std::uint64_t bytes, PageHashScratch* scratch, Word* noted,
                        Word* written, cudaStream_t stream) {
  REEF_LAUNCH(hash_kernel, blocks_for(bytes), kThreads, stream, static_cast<const unsigned char*>(data),
              bytes, scratch, noted, written);
  return cudaGetLastError();
}

}  // namespace

cudaError_t hash_page(const void* data, std::uint64_t bytes, PageHashScratch* scratch, cudaStream_t stream) {
  return launch_hash(data, bytes, scratch, nullptr, nullptr, stream);
}

cudaError_t note_page_hash(const void* data, std::uint64_t bytes, unsigned long long* noted,
                           PageHashScratch* scratch, cudaStream_t stream) {
  return launch_hash(data, bytes, scratch, noted, nullptr, stream);
}

cudaError_t write_page_if_changed(const void* data, std::uint64_t bytes, void* copy,
                                  unsigned long long* noted, PageHashScratch* scratch,
                                  unsigned long long* written, cudaStream_t stream) {
  if (const cudaError_t error = launch_hash(data, bytes, scratch, noted, written, stream)) return error;
  REEF_LAUNCH(copy_kernel, blocks_for(bytes), kThreads, stream, static_cast<const unsigned char*>(data),
              bytes, static_cast<const PageHashScratch*>(scratch), static_cast<unsigned char*>(copy));
  return cudaGetLastError();
}

}  // namespace reef::kernels::cuda
