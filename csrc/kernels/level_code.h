#pragma once

#include <cstdint>

#include "kernels/packed_levels.h"

namespace reef::kernels {

/// What encode_levels() has packed, in an entropy code: shorter, and the same bits again when it is decoded.
/// Each kLevelCodeBlocks blocks (the last may be fewer) have a body of their own, so that they are made and
/// read beside each other. A code is
///   - 4 bytes for each body: how many bytes it has, or 0 where an entropy code would be no shorter;
///   - the bodies. One of 0 is the blocks as they are packed. Another is half the step of each block, 4 bytes
///     each, and the symbols of all blocks that have a step (above 0; the others' levels are all zero), in
///     huffman.h's code; nothing, if none has one.
/// A symbol is as many codes of levels as 8 bits have room for, so that levels which are hardly ever another
/// than zero take less than a bit: of 2, 4 and 8 bits a byte as it is packed, of 3 bits those of elements i
/// and i + 256 of the block, and of other bits one code.
inline constexpr std::int64_t kLevelCodeBlocks = 64;

/// The most bytes that the code of so many blocks can have: those of the blocks, and 4 for each body.
constexpr std::int64_t most_level_code_bytes(std::int64_t blocks, int bits) {
  return packed_bytes(blocks * kLevelBlock, bits) + (blocks + kLevelCodeBlocks - 1) / kLevelCodeBlocks * 4;
}

/// Encodes blocks with `bits` from 2 to 8 and gives how many bytes the code has. `code` has room for the
/// most.
std::int64_t encode_level_code(const std::uint8_t* packed, std::int64_t blocks, int bits, std::uint8_t* code);

/// Decodes a code of exactly `size` bytes, and gives nullptr; or what is wrong with it, whatever those bytes
/// are: then what is in `packed` means nothing. Reads nothing beyond them.
[[nodiscard]] const char* decode_level_code(const std::uint8_t* code, std::int64_t size, std::int64_t blocks,
                                            int bits, std::uint8_t* packed);

}  // namespace reef::kernels
