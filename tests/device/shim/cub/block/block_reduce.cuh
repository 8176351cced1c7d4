#pragma once

#include <cub/block/scratch.cuh>

namespace cub {

/// Sums in the order of BLOCK_REDUCE_WARP_REDUCTIONS: within a warp by shuffles from 1, 2, 4 ... threads
/// ahead, then over the warps. As in CUB, only thread 0 gets the sum.
template <class Number, int kThreads>
class BlockReduce {
 public:
  using TempStorage = Scratch<Number, kThreads>;
  explicit BlockReduce(TempStorage& scratch) : scratch_(scratch) {}

  Number Sum(Number mine) {
    using reef::played::Exchange;
    using reef::played::kWarpThreads;
    scratch_.use();
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
