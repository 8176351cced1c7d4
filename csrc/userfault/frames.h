#pragma once

#include <sys/mman.h>

#include <cstdint>

#include "round_up.h"

namespace reef {

/// The units in which the kernel gives memory to addresses. Large ones are found, and moved, 25 times as fast
/// for their size; but the kernel gives them only where addresses and bytes are multiples of them, and small
/// ones where it has no others left.
inline constexpr std::uint64_t kFrameBytes = 4096;
inline constexpr std::uint64_t kLargeFrameBytes = std::uint64_t{2} << 20;

/// Whether the system gives large frames to those who ask for them.
bool has_large_frames();

/// Gives [data, data + bytes) frames where it has none, and of its own where it shares them with a forked
/// process; what they hold stays. False: the system has none, or is older than Linux 5.14.
inline bool populate(void* data, std::uint64_t bytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  return ::madvise(data, bytes, kPopulateWrite) == 0;
}

/// Copies what lies in [data, data + bytes) into large frames, those at its ends included. False: the system
/// has none, something holds what lies there, or it is older than Linux 6.1.
inline bool collapse(void* data, std::uint64_t bytes) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE
  const auto start = reinterpret_cast<std::uint64_t>(data);
  const std::uint64_t begin = start / kLargeFrameBytes * kLargeFrameBytes;
  const std::uint64_t end = round_up(start + bytes, kLargeFrameBytes);
  return ::madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse) == 0;
}

}  // namespace reef
