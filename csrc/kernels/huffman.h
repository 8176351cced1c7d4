#pragma once

#include <cstdint>

namespace reef::kernels {

/// Huffman's code of bytes that are less than `alphabet` (an even number, 256 at most), each in at most
/// kLongestCode bits. It is
///   - a table: the length of each byte's code, 4 bits each and the first of two lowest; 0 where a byte does
///     not occur. Of codes of one length the lower byte has the lower one (a canonical code);
///   - the bytes of the first three of four streams, 4 each;
///   - the streams: the codes of a quarter of the bytes each, in order, from the lowest bit on; what is left
///     of a stream's last byte is zeros.
/// The lengths are Huffman's own if none is above kLongestCode, and else those of the counts where each that
/// is not 0 is at least a 4096th of all (or a 2048th and so on, until none is).
inline constexpr int kLongestCode = 12;

/// What the code has beside its streams.
constexpr std::int64_t huffman_head_bytes(int alphabet) { return alphabet / 2 + 12; }

/// Encodes `count` bytes and gives how many bytes the code has, or 0 if those are more than `most`. `code`
/// has room for `most` bytes and kHuffmanSlack beyond.
std::int64_t encode_huffman(const std::uint8_t* bytes, std::int64_t count, int alphabet, std::uint8_t* code,
                            std::int64_t most);
inline constexpr std::int64_t kHuffmanSlack = 16;

/// Decodes a code of exactly `size` bytes, and gives nullptr; or what is wrong with it, whatever those bytes
/// are. Reads nothing beyond them, and writes nothing beyond `count` bytes.
[[nodiscard]] const char* decode_huffman(const std::uint8_t* code, std::int64_t size, int alphabet,
                                         std::uint8_t* bytes, std::int64_t count);

}  // namespace reef::kernels
