#pragma once

#include <cuda_runtime_api.h>

namespace cub {

/// Adds up as BLOCK_REDUCE_WARP_REDUCTIONS does: within a warp by shuffles from the next thread, the next
/// two, the next four ..., then the warps in their order. As in CUB, the sum is thread 0's alone, and the
/// scratch may be used again only behind a barrier.
template <class Number, int kThreads>
class BlockReduce {
 public:
  struct TempStorage {
    Number of[kThreads];
    std::uint64_t used[kThreads];
  };
  explicit BlockReduce(TempStorage& scratch) : scratch_(scratch) {}

  Number Sum(Number mine) {
    using reef::played::Exchange;
    using reef::played::kWarpThreads;
    reef::played::use_scratch(scratch_.used);
    const unsigned self = threadIdx.x % kWarpThreads;
    Number* const warp = scratch_.of + (threadIdx.x - self);
    for (unsigned offset = 1; offset < kWarpThreads; offset *= 2) {
      warp[self] = mine;
      reef::played::meet_tile(kWarpThreads, Exchange::kReduce);
      const bool has_other = self + offset < kWarpThreads;
      const Number other = has_other ? warp[self + offset] : Number{};
      reef::played::meet_tile(kWarpThreads, Exchange::kReduce);
      if (has_other) mine = mine + other;
    }
    if (self == 0) warp[0] = mine;
    reef::played::meet_block(Exchange::kReduce);
    if (threadIdx.x != 0) {
      Number nothing;
      std::memset(&nothing, 0x5A, sizeof nothing);
      return nothing;
    }
    for (unsigned first = kWarpThreads; first < kThreads; first += kWarpThreads)
      mine = mine + scratch_.of[first];
    return mine;
  }

 private:
  TempStorage& scratch_;
};

}  // namespace cub
