#pragma once

#include <cub/block/scratch.cuh>

namespace cub {

/// Gives every thread the combined values of the threads before it.
template <class Value, int kThreads>
class BlockScan {
 public:
  using TempStorage = Scratch<Value, kThreads>;
  explicit BlockScan(TempStorage& scratch) : scratch_(scratch) {}

  void ExclusiveSum(Value mine, Value& before) {
    ExclusiveScan(mine, before, Value{}, [](const Value& a, const Value& b) { return a + b; });
  }
  template <class Combine>
  void ExclusiveScan(Value mine, Value& before, Value first, Combine combine) {
    scratch_.use();
    scratch_.of[threadIdx.x] = mine;
    reef::played::meet_block(reef::played::Exchange::kReduce);
    before = first;
    for (unsigned i = 0; i < threadIdx.x; ++i) before = combine(before, scratch_.of[i]);
  }

 private:
  TempStorage& scratch_;
};

}  // namespace cub
