#include "kernels/cuda/count_nonfinite.h"

#include <algorithm>
#include <cstddef>
#include <cub/block/block_reduce.cuh>

#include "kernels/cuda/grid.h"
#include "kernels/cuda/launch.h"
#include "kernels/lane.h"

namespace reef::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class Bits>
struct alignas(16) Vector {
  static constexpr std::int64_t kElements = 16 / sizeof(Bits);
  Bits of[kElements];
};

/// Counts elements whose exponent bits are all set. The `head` elements before the first 16-byte boundary and
/// the tail, which is shorter than a vector, are read one by one; all others as whole vectors.
template <class Bits>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const Bits* data, std::int64_t elements, std::int64_t head, Bits exponent,
                 unsigned long long* found) {
  using V = Vector<Bits>;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t vectors = (elements - head) / V::kElements;
  const std::int64_t tail = head + vectors * V::kElements;
  const auto* body = reinterpret_cast<const V*>(data + head);

  unsigned long long mine = 0;
  for (std::int64_t i = thread; i < vectors; i += threads) {
    const V vector = body[i];
    REEF_UNROLL
    for (int k = 0; k < V::kElements; ++k) mine += (vector.of[k] & exponent) == exponent;
  }
  if (thread < head) mine += (data[thread] & exponent) == exponent;
  if (thread < elements - tail) mine += (data[tail + thread] & exponent) == exponent;

  using Reduce = cub::BlockReduce<unsigned long long, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  const unsigned long long in_block = Reduce(scratch).Sum(mine);
  if (threadIdx.x == 0 && in_block != 0) atomicAdd(found, in_block);
}

}  // namespace

cudaError_t count_nonfinite(const void* data, std::int64_t elements, FloatFormat format,
                            unsigned long long* found, cudaStream_t stream) {
  if (const cudaError_t error = cudaMemsetAsync(found, 0, sizeof *found, stream)) return error;
  return with_exponent(format, [&](auto exponent) {
    using Bits = decltype(exponent);
    int blocks = 0;
    const std::int64_t per_block = kThreads * Vector<Bits>::kElements;
    if (const cudaError_t error = grid_for(reinterpret_cast<const void*>(&count_kernel<Bits>), kThreads,
                                           (elements + per_block - 1) / per_block, blocks)) {
      return error;
    }
    const std::size_t past_boundary = reinterpret_cast<std::uintptr_t>(data) % 16;
    const auto to_boundary = static_cast<std::int64_t>((16 - past_boundary) % 16 / sizeof(Bits));
    REEF_LAUNCH(count_kernel<Bits>, blocks, kThreads, stream, static_cast<const Bits*>(data), elements,
                std::min(elements, to_boundary), exponent, found);
    return cudaGetLastError();
  });
}

}  // namespace reef::kernels::cuda
