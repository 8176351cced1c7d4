#pragma once

#include <cstdint>

namespace reef::kernels {

/// What is done with a block of at most kLevelBlock elements.
struct PackedBlocks {
  void (*encode_levels)(const float* values, std::int64_t count, int bits, std::uint64_t key,
                        std::uint8_t* packed);
  void (*encode_signs)(float* values, std::int64_t count, std::uint8_t* packed);
  void (*sum)(const std::uint8_t* const* parts, std::int64_t parts_count, int bits, std::int64_t count,
              float* to);
  /// The codes of a block's levels, which are packed without gaps, as kLevelBlock bytes; and back.
  void (*unpack)(const std::uint8_t* packed, int bits, std::uint8_t* codes);
  void (*pack)(const std::uint8_t* codes, int bits, std::uint8_t* packed);
};
/// Returns the kernels for the instructions that this processor has.
const PackedBlocks& packed_blocks();
/// nullptr: the processor has none.
const PackedBlocks* packed_blocks_with_avx2();

}  // namespace reef::kernels
