#pragma once

#include <cuda_runtime_api.h>

namespace cub {

/// The shared memory for collectives of a whole block. As in CUB, a block must pass a barrier before it uses
/// the memory again.
template <class Value, int kThreads>
struct Scratch {
  Value of[kThreads];
  std::uint64_t used[kThreads];

  void use() { reef::played::use_scratch(used); }
};

}  // namespace cub
