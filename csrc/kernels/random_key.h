#pragma once

#include <cstdint>
#include <initializer_list>

namespace reef::kernels {

/// A bijection whose values look like chance (SplitMix64's finalizer).
inline std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

inline constexpr std::uint64_t kNextKey = 0x9E3779B97F4A7C15U;

/// A number as if by chance for what these tell apart: the same on all machines.
inline std::uint64_t random_key(std::initializer_list<std::uint64_t> numbers) {
  std::uint64_t key = 0;
  for (const std::uint64_t number : numbers) key = mixed(key + number + kNextKey);
  return key;
}

}  // namespace reef::kernels
