#pragma once

#include <cooperative_groups.h>

namespace cooperative_groups {

template <unsigned kSize, class Number, class Combine>
Number reduce(thread_block_tile<kSize>, Number mine, Combine combine) {
  return static_cast<Number>(reef::played::exchange_in_tile(
      kSize, reef::played::Exchange::kReduce, static_cast<std::uint64_t>(mine), [&](auto a, auto b) {
        return static_cast<std::uint64_t>(combine(static_cast<Number>(a), static_cast<Number>(b)));
      }));
}

}  // namespace cooperative_groups
