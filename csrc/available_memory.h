#pragma once

#include <cstdint>

namespace reef {

/// Returns the bytes of host memory that can be had now without swapping: what the system has available, or
/// what the process's control groups leave of it, if that is less. 0 where the system does not say.
std::uint64_t available_memory_bytes();

}  // namespace reef
