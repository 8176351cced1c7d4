#pragma once

#include <cuda_runtime_api.h>

namespace cooperative_groups {

struct thread_block {};
inline thread_block this_thread_block() { return {}; }

template <unsigned kSize>
struct thread_block_tile {
  unsigned thread_rank() const { return threadIdx.x % kSize; }
  bool any(bool mine) const { return exchanged(reef::played::Exchange::kAny, mine ? 1 : 0) != 0; }
  unsigned ballot(bool mine) const {
    return static_cast<unsigned>(
        exchanged(reef::played::Exchange::kBallot, mine ? std::uint64_t{1} << thread_rank() : 0));
  }

 private:
  static std::uint64_t exchanged(reef::played::Exchange in, std::uint64_t mine) {
    return reef::played::exchange_in_tile(kSize, in, mine, [](auto a, auto b) { return a | b; });
  }
};

template <unsigned kSize>
thread_block_tile<kSize> tiled_partition(thread_block) {
  return {};
}

template <class Number>
struct plus {
  Number operator()(Number a, Number b) const { return a + b; }
};
template <class Number>
struct greater {
  Number operator()(Number a, Number b) const { return a > b ? a : b; }
};

}  // namespace cooperative_groups
