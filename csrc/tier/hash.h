#pragma once

#include <cstdint>

namespace reef {

/// XXH3, 64 bits.
std::uint64_t hash_bytes(const void* data, std::uint64_t bytes);

/// The same, twice as fast; nullptr where the processor cannot. (Twins: hash_avx2.cpp, no_hash_avx2.cpp.)
using HashBytes = std::uint64_t (*)(const void* data, std::uint64_t bytes);
HashBytes hash_with_avx2();

}  // namespace reef
