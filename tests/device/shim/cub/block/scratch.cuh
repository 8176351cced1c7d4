#pragma once

#include <cuda_runtime_api.h>

namespace cub {

/// The shared memory of a collective of a whole block. As CUB demands, a block may use it a second time only
/// behind a barrier.
template <class Value, int kThreads>
struct Scratch {
  Value of[kThreads];
  std::uint64_t used[kThreads];

  void use() { reef::played::use_scratch(used); }
};

}  // namespace cub
