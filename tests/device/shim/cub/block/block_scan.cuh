#pragma once

#include <cuda_runtime_api.h>

namespace cub {

/// As in CUB, the scratch may be used again only behind a barrier.
template <class Value, int kThreads>
class BlockScan {
 public:
  struct TempStorage {
    Value of[kThreads];
    std::uint64_t used[kThreads];
  };
  explicit BlockScan(TempStorage& scratch) : scratch_(scratch) {}

  void ExclusiveSum(Value mine, Value& before) {
    ExclusiveScan(mine, before, Value{}, [](const Value& a, const Value& b) { return a + b; });
  }
  template <class Combine>
  void ExclusiveScan(Value mine, Value& before, Value first, Combine combine) {
    reef::played::use_scratch(scratch_.used);
    scratch_.of[threadIdx.x] = mine;
    reef::played::meet_block(reef::played::Exchange::kReduce);
    before = first;
    for (unsigned i = 0; i < threadIdx.x; ++i) before = combine(before, scratch_.of[i]);
  }

 private:
  TempStorage& scratch_;
};

}  // namespace cub
