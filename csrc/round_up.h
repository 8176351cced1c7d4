#pragma once

#include <cstdint>

namespace reef {

/// To the next multiple of `unit`.
constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace reef
