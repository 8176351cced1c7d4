#include "kernels/cuda/top_k.h"

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <cstddef>
#include <cub/block/block_scan.cuh>

#include "kernels/cuda/launch.h"

namespace reef::kernels::cuda {
namespace {

using namespace top_k;
namespace groups = cooperative_groups;

constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / kWarp;

/// Returns what is known of the threshold before this digit is searched for.
template <int kDigit>
__device__ Threshold known(const Scratch* scratch, std::uint32_t k) {
  if constexpr (kDigit == 0) {
    return {0, k};
  } else {
    return scratch->threshold;
  }
}

__device__ std::int64_t part_of_warp() {
  return std::int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarp;
}
__device__ int thread_of_warp() { return static_cast<int>(threadIdx.x % kWarp); }

/// Calls `work(index, value)` in all threads of a warp for each row of the warp's part. `value` is what
/// `read(index)` returns for the thread's element of the row, or 0 beyond the last element.
template <class Read, class Work>
__device__ void each_row(std::int64_t elements, std::int64_t parts, const Read& read, const Work& work) {
  if (part_of_warp() >= parts) return;
  const Tiles tiles = tiles_of_part(part_of_warp(), parts, elements);
  for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile) {
    float values[kRows];
    REEF_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const std::int64_t index = index_of(tile, row, thread_of_warp());
      values[row] = index < elements ? read(index) : 0;
    }
    REEF_UNROLL
    for (int row = 0; row < kRows; ++row) work(index_of(tile, row, thread_of_warp()), values[row]);
  }
}

/// Builds a histogram of one digit over all elements whose higher digits are those of the threshold. For the
/// first digit, also writes the sums of gradient and residual to `left`.
template <int kDigit>
__global__ void __launch_bounds__(kBlockThreads)
    count_kernel(const float* gradient, const float* residual, float* left, std::int64_t elements,
                 std::int64_t parts, std::uint32_t k, Scratch* scratch) {
  __shared__ std::uint32_t counts[bins_of(kDigit)];
  for (int bin = static_cast<int>(threadIdx.x); bin < bins_of(kDigit); bin += kBlockThreads) counts[bin] = 0;
  __syncthreads();
  const Threshold threshold = known<kDigit>(scratch, k);
  each_row(
      elements, parts,
      [&](std::int64_t i) {
        if constexpr (kDigit == 0) {
          const float sum = sum_of(gradient, residual, i);
          left[i] = sum;
          return sum;
        } else {
          return left[i];
        }
      },
      [&](std::int64_t, float value) {
        const int bin = bin_of(value, kDigit, threshold);
        if (bin >= 0) atomicAdd(&counts[bin], 1U);
      });
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < bins_of(kDigit); bin += kBlockThreads) {
    if (counts[bin] > 0) atomicAdd(&scratch->counts[kDigit][bin], counts[bin]);
  }
}

template <int kDigit>
__global__ void __launch_bounds__(kGathering) find_digit_kernel(std::uint32_t k, Scratch* scratch) {
  using Scan = cub::BlockScan<std::uint32_t, kGathering>;
  __shared__ typename Scan::TempStorage shared;
  const FindDigit find(scratch->counts[kDigit], kDigit, known<kDigit>(scratch, k),
                       static_cast<int>(threadIdx.x));
  std::uint32_t above = 0;
  Scan(shared).ExclusiveSum(find.counted(), above);
  __syncthreads();  // All threads have read the threshold before end() overwrites it.
  find.end(above, &scratch->threshold);
}

__global__ void __launch_bounds__(kBlockThreads)
    count_parts_kernel(const float* left, std::int64_t elements, std::int64_t parts, Scratch* scratch) {
  const Threshold threshold = scratch->threshold;
  Counts counts{0, 0};
  each_row(
      elements, parts, [&](std::int64_t i) { return left[i]; },
      [&](std::int64_t, float value) {
        counts = counts + Counts{is_above(value, threshold) ? 1U : 0U, is_at(value, threshold) ? 1U : 0U};
      });
  if (part_of_warp() >= parts) return;
  const auto warp = groups::tiled_partition<kWarp>(groups::this_thread_block());
  const Counts sum{groups::reduce(warp, counts.larger, groups::plus<std::uint32_t>()),
                   groups::reduce(warp, counts.equal, groups::plus<std::uint32_t>())};
  if (warp.thread_rank() == 0) scratch->of_parts[part_of_warp()] = sum;
}

__global__ void __launch_bounds__(kGathering) find_before_kernel(std::int64_t parts, Scratch* scratch) {
  using Scan = cub::BlockScan<Counts, kGathering>;
  __shared__ typename Scan::TempStorage shared;
  const FindBefore find(scratch->of_parts, parts, static_cast<int>(threadIdx.x));
  Counts before{0, 0};
  Scan(shared).ExclusiveScan(find.counted(), before, Counts{0, 0},
                             [](const Counts& a, const Counts& b) { return a + b; });
  find.end(before);
}

__global__ void __launch_bounds__(kBlockThreads)
    take_kernel(float* left, std::int64_t elements, std::int64_t parts, SparseEntry* entries,
                const Scratch* scratch) {
  if (part_of_warp() >= parts) return;
  const Threshold threshold = scratch->threshold;
  const auto warp = groups::tiled_partition<kWarp>(groups::this_thread_block());
  Take part(threshold, scratch->of_parts[part_of_warp()], entries, thread_of_warp());
  each_row(
      elements, parts, [&](std::int64_t i) { return left[i]; },
      [&](std::int64_t i, float value) {
        const std::uint32_t larger = warp.ballot(is_above(value, threshold));
        const std::uint32_t equal = warp.ballot(is_at(value, threshold));
        const float rest = part.take(i, value, larger, equal);
        if (i < elements && rest != value) left[i] = rest;
      });
}

template <int kDigit>
cudaError_t find_digit(const float* gradient, const float* residual, float* left, std::int64_t elements,
                       std::uint32_t k, Scratch* scratch, int blocks, cudaStream_t stream) {
  REEF_LAUNCH(count_kernel<kDigit>, blocks, kBlockThreads, stream, gradient, residual, left, elements,
              parts_of(elements), k, scratch);
  REEF_LAUNCH(find_digit_kernel<kDigit>, 1, kGathering, stream, k, scratch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t take_largest(const float* gradient, const float* residual, float* left, std::int64_t elements,
                         std::uint32_t k, SparseEntry* entries, Scratch* scratch, cudaStream_t stream) {
  const std::int64_t parts = parts_of(elements);
  const auto blocks = static_cast<int>((parts + kBlockWarps - 1) / kBlockWarps);
  const auto find = [&](auto of_digit) {
    return of_digit(gradient, residual, left, elements, k, scratch, blocks, stream);
  };
  if (const cudaError_t error = cudaMemsetAsync(scratch->counts, 0, sizeof scratch->counts, stream))
    return error;
  if (const cudaError_t error = cudaMemsetAsync(entries, 0xFF, std::size_t{k} * sizeof *entries, stream))
    return error;
  if (const cudaError_t error = find(&find_digit<0>)) return error;
  if (const cudaError_t error = find(&find_digit<1>)) return error;
  if (const cudaError_t error = find(&find_digit<2>)) return error;
  REEF_LAUNCH(count_parts_kernel, blocks, kBlockThreads, stream, left, elements, parts, scratch);
  REEF_LAUNCH(find_before_kernel, 1, kGathering, stream, parts, scratch);
  REEF_LAUNCH(take_kernel, blocks, kBlockThreads, stream, left, elements, parts, entries, scratch);
  return cudaGetLastError();
}

}  // namespace reef::kernels::cuda
