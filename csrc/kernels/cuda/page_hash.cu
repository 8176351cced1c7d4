#include "kernels/cuda/page_hash.h"

#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "kernels/cuda/launch.h"
#include "kernels/lane.h"

namespace reef::kernels::cuda {
namespace {

using Word = unsigned long long;

constexpr int kThreads = 256;
static_assert(kHashSums <= kThreads, "a block adds the sums up, one a thread");
constexpr std::uint64_t kVectorsOfThread = 64;  ///< fewer are not worth another block

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

/// A block's threads take vectors in turns; the bytes behind the last whole vector are padded with zeros.
__global__ void __launch_bounds__(kThreads)
    hash_kernel(const unsigned char* data, std::uint64_t bytes, Word* sums) {
  const std::uint64_t thread = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t vectors = bytes / sizeof(Vector);
  const auto* const whole = reinterpret_cast<const Vector*>(data);
  Word mine = 0;
  _Pragma("unroll 4") for (std::uint64_t i = thread; i < vectors; i += threads) {
    const Vector vector = whole[i];
    mine += mix(vector.of[0], 2 * i) + mix(vector.of[1], 2 * i + 1);
  }
  if (thread == 0 && vectors * sizeof(Vector) < bytes) {
    Word rest[2] = {0, 0};
    for (std::uint64_t i = vectors * sizeof(Vector); i < bytes; ++i)
      rest[i / sizeof(Word) % 2] |= Word{data[i]} << 8 * (i % sizeof(Word));
    mine += mix(rest[0], 2 * vectors) + mix(rest[1], 2 * vectors + 1);
  }
  __shared__ typename Reduce::TempStorage scratch;
  const Word in_block = Reduce(scratch).Sum(mine);
  if (threadIdx.x == 0) sums[blockIdx.x] = in_block;
}

/// Thread 0 gets the hash.
__device__ Word hash_of(const Word* sums, int count) {
  __shared__ typename Reduce::TempStorage scratch;
  return Reduce(scratch).Sum(static_cast<int>(threadIdx.x) < count ? sums[threadIdx.x] : 0);
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const unsigned char* data, std::uint64_t bytes, const Word* sums, int count,
                const Word* noted, unsigned char* copy) {
  __shared__ bool same;
  const Word hash = hash_of(sums, count);
  if (threadIdx.x == 0) same = hash == *noted;
  __syncthreads();
  if (same) return;
  const std::uint64_t thread = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * kThreads;
  const std::uint64_t vectors = bytes / sizeof(Vector);
  const auto* const from = reinterpret_cast<const Vector*>(data);
  auto* const to = reinterpret_cast<Vector*>(copy);
  for (std::uint64_t i = thread; i < vectors; i += threads) to[i] = from[i];
  const std::uint64_t rest = vectors * sizeof(Vector) + thread;
  if (rest < bytes) copy[rest] = data[rest];
}

/// Of one block. Counts a hash that is another if `written` is given.
__global__ void __launch_bounds__(kThreads)
    note_kernel(const Word* sums, int count, Word* noted, Word* written) {
  const Word hash = hash_of(sums, count);
  if (threadIdx.x != 0) return;
  if (written != nullptr) {
    if (hash == *noted) return;
    atomicAdd(written, Word{1});
  }
  *noted = hash;
}

int blocks_for(std::uint64_t bytes) {
  constexpr std::uint64_t kBytesOfBlock = kThreads * kVectorsOfThread * sizeof(Vector);
  return static_cast<int>(std::min<std::uint64_t>((bytes + kBytesOfBlock - 1) / kBytesOfBlock, kHashSums));
}

}  // namespace

cudaError_t hash_page(const void* data, std::uint64_t bytes, unsigned long long* sums, int& count,
                      cudaStream_t stream) {
  count = blocks_for(bytes);
  REEF_LAUNCH(hash_kernel, count, kThreads, stream, static_cast<const unsigned char*>(data), bytes, sums);
  return cudaGetLastError();
}

cudaError_t note_page_hash(const void* data, std::uint64_t bytes, unsigned long long* noted,
                           unsigned long long* sums, cudaStream_t stream) {
  int count = 0;
  if (const cudaError_t error = hash_page(data, bytes, sums, count, stream)) return error;
  REEF_LAUNCH(note_kernel, 1, kThreads, stream, sums, count, noted, static_cast<Word*>(nullptr));
  return cudaGetLastError();
}

cudaError_t write_page_if_changed(const void* data, std::uint64_t bytes, void* copy,
                                  unsigned long long* noted, unsigned long long* sums,
                                  unsigned long long* written, cudaStream_t stream) {
  int count = 0;
  if (const cudaError_t error = hash_page(data, bytes, sums, count, stream)) return error;
  REEF_LAUNCH(copy_kernel, count, kThreads, stream, static_cast<const unsigned char*>(data), bytes, sums,
              count, noted, static_cast<unsigned char*>(copy));
  if (const cudaError_t error = cudaGetLastError()) return error;
  REEF_LAUNCH(note_kernel, 1, kThreads, stream, sums, count, noted, written);
  return cudaGetLastError();
}

}  // namespace reef::kernels::cuda
