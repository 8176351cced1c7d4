#pragma once

#include <cstdint>

namespace reef {

/// XXH3, 64 bits.
std::uint64_t hash_bytes(const void* data, std::uint64_t bytes);

}  // namespace reef
