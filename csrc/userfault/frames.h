#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace reef {

/// The unit in which the kernel gives memory to addresses.
inline constexpr std::uint64_t kFrameBytes = 4096;

/// Gives [data, data + bytes) frames where it has none, and of its own where it shares them with a forked
/// process; what they hold stays. False: the system has none, or is older than Linux 5.14.
inline bool populate(void* data, std::uint64_t bytes) {
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE
  return ::madvise(data, bytes, kPopulateWrite) == 0;
}

}  // namespace reef
