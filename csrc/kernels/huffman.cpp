#include "kernels/huffman.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace reef::kernels {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "streams are words of 64 bits, lowest byte first");

constexpr int kStreams = 4;
constexpr int kAlphabet = 256;
constexpr std::uint32_t kTableSize = 1U << kLongestCode;
constexpr int kAtOnce = 4;  // codes for which 56 bits are enough
static_assert(kAtOnce * kLongestCode <= 56);

using Counts = std::array<std::uint32_t, kAlphabet>;
using Lengths = std::array<std::uint8_t, kAlphabet>;

// The bits of a byte's code; the first bit is the lowest.
struct ByteCode {
  std::uint16_t bits = 0;
  std::uint16_t length = 0;
};
using ByteCodes = std::array<ByteCode, kAlphabet>;

std::int64_t begin_of_stream(std::int64_t count, int stream) { return count * stream / kStreams; }

// Counts in four tables in turn, so that a byte that is repeated does not wait for its own count.
Counts counted(const std::uint8_t* bytes, std::int64_t count) {
  std::array<Counts, 4> of{};
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (std::size_t k = 0; k < 4; ++k) ++of[k][bytes[i + static_cast<std::int64_t>(k)]];
  }
  for (; i < count; ++i) ++of[0][bytes[i]];
  for (std::size_t byte = 0; byte < kAlphabet; ++byte) of[0][byte] += of[1][byte] + of[2][byte] + of[3][byte];
  return of[0];
}

// Builds Huffman's tree of these counts, which must not all be 0, from two sorted queues: leaves, and nodes
// that have been joined. Returns the largest depth of a leaf.
int find_lengths(const Counts& counts, Lengths& lengths) {
  std::array<std::uint64_t, kAlphabet> leaves;  // the count above the byte: numbers are sorted fastest
  std::size_t used = 0;
  for (std::size_t byte = 0; byte < kAlphabet; ++byte) {
    if (counts[byte] != 0) leaves[used++] = std::uint64_t{counts[byte]} << 8U | byte;
  }
  lengths.fill(0);
  if (used == 1) {
    lengths[leaves[0] & 255U] = 1;
    return 1;
  }
  std::sort(leaves.begin(), leaves.begin() + static_cast<std::ptrdiff_t>(used));
  std::array<std::uint64_t, 2 * kAlphabet> weight;
  std::array<std::uint16_t, 2 * kAlphabet> parent, depth;
  for (std::size_t i = 0; i < used; ++i) weight[i] = leaves[i] >> 8U;
  std::size_t leaf = 0, joined = used;
  const auto take = [&](std::size_t next) {
    const bool takes_leaf = leaf < used && (joined == next || weight[leaf] <= weight[joined]);
    const std::size_t taken = takes_leaf ? leaf++ : joined++;
    parent[taken] = static_cast<std::uint16_t>(next);
    return weight[taken];
  };
  const std::size_t root = 2 * used - 2;
  for (std::size_t next = used; next <= root; ++next) {
    weight[next] = take(next);
    weight[next] += take(next);
  }
  int deepest = 0;
  depth[root] = 0;
  for (std::size_t i = root; i-- > 0;) {
    depth[i] = static_cast<std::uint16_t>(depth[parent[i]] + 1);
    if (i >= used) continue;
    deepest = std::max<int>(deepest, depth[i]);
    lengths[leaves[i] & 255U] = static_cast<std::uint8_t>(depth[i]);
  }
  return deepest;
}

Lengths lengths_of(Counts counts, std::int64_t all) {
  Lengths lengths;
  std::uint32_t least = static_cast<std::uint32_t>(all >> kLongestCode) + 1;
  for (; find_lengths(counts, lengths) > kLongestCode; least *= 2) {
    for (std::uint32_t& each : counts) each = each == 0 ? 0 : std::max(each, least);
  }
  return lengths;
}

// Returns the canonical code of these lengths, which must be those of a code.
ByteCodes codes_of(const Lengths& lengths) {
  std::array<std::uint32_t, kLongestCode + 1> of_length{}, next{};
  for (const std::uint8_t length : lengths) ++of_length[length];
  of_length[0] = 0;
  for (std::size_t length = 1; length <= kLongestCode; ++length)
    next[length] = (next[length - 1] + of_length[length - 1]) * 2;
  ByteCodes codes;
  for (std::size_t byte = 0; byte < kAlphabet; ++byte) {
    const std::uint8_t length = lengths[byte];
    if (length == 0) continue;
    std::uint32_t bits = next[length]++, reversed = 0;
    for (int i = 0; i < length; ++i, bits >>= 1U) reversed = reversed << 1U | (bits & 1U);
    codes[byte] = {static_cast<std::uint16_t>(reversed), length};
  }
  return codes;
}

// Returns the stream's end. Up to 8 bytes beyond it may be overwritten.
std::uint8_t* write_stream(const std::uint8_t* bytes, std::int64_t count, const ByteCodes& codes,
                           std::uint8_t* to) {
  std::uint64_t bits = 0;
  unsigned has = 0;
  const auto put = [&](std::uint8_t byte) {
    bits |= static_cast<std::uint64_t>(codes[byte].bits) << has;
    has += codes[byte].length;
  };
  const auto flush = [&] {
    std::memcpy(to, &bits, sizeof bits);
    to += has / 8;
    bits >>= has / 8 * 8;
    has %= 8;
  };
  std::int64_t i = 0;
  for (; i + kAtOnce <= count; i += kAtOnce) {
    for (int k = 0; k < kAtOnce; ++k) put(bytes[i + k]);
    flush();
  }
  for (; i < count; ++i) put(bytes[i]);
  flush();
  return to + (has > 0 ? 1 : 0);
}

// The byte whose code the next bits begin with, and the length of that code.
struct Entry {
  std::uint8_t byte, length;
};
using Table = std::array<Entry, kTableSize>;

// Refuses a table unless every sequence of bits is a sequence of its codes, or it has one byte alone, whose
// code is one bit.
const char* read_table(const std::uint8_t* packed, int alphabet, Table& table) {
  Lengths lengths{};
  std::uint32_t room = 0, used = 0;
  for (std::size_t byte = 0; byte < static_cast<std::size_t>(alphabet); ++byte) {
    const std::uint8_t length = packed[byte / 2] >> (byte % 2 * 4) & 15U;
    if (length > kLongestCode) return "a code in it is longer than any can be";
    if (length == 0) continue;
    lengths[byte] = length;
    room += kTableSize >> length;
    ++used;
  }
  const bool one_alone = used == 1 && room == kTableSize / 2;
  if (room != kTableSize && !one_alone) return "the lengths of its codes are not those of any code";
  const ByteCodes codes = codes_of(lengths);
  if (one_alone) table.fill({0, 0});
  for (std::size_t byte = 0; byte < kAlphabet; ++byte) {
    const ByteCode code = codes[byte];
    if (code.length == 0) continue;
    const Entry entry{static_cast<std::uint8_t>(byte), static_cast<std::uint8_t>(code.length)};
    for (std::size_t at = code.bits; at < kTableSize; at += std::size_t{1} << code.length) table[at] = entry;
  }
  return nullptr;
}

// The reader of one stream: bits that it has taken from memory already, and the bytes that follow.
struct Stream {
  std::uint64_t bits = 0;
  unsigned has = 0;
  const std::uint8_t* from = nullptr;
  const std::uint8_t* end = nullptr;
  std::uint8_t* to = nullptr;
  std::uint8_t* last = nullptr;

  bool may_take_at_once() const { return end - from >= 8 && last - to >= kAtOnce; }
  // Fills up to at least 56 bits. 8 bytes must be left.
  void refill() {
    std::uint64_t word;
    std::memcpy(&word, from, sizeof word);
    bits |= word << has;
    from += (63 - has) / 8;
    has |= 56U;
  }
  void take(const Table& table) {
    const Entry entry = table[bits & (kTableSize - 1)];
    *to++ = entry.byte;
    bits >>= entry.length;
    has -= entry.length;
  }
  // Decodes the rest byte by byte, and checks that the stream ends with the last code.
  const char* finish(const Table& table) {
    while (to < last) {
      for (; has <= 48 && from < end; has += 8) bits |= static_cast<std::uint64_t>(*from++) << has;
      const Entry entry = table[bits & (kTableSize - 1)];
      if (entry.length == 0) return "it has a code that its table has not";
      if (entry.length > has) return "it ends within a code";
      take(table);
    }
    if (from != end || has >= 8 || bits != 0) return "it goes on behind its last code";
    return nullptr;
  }
};

}  // namespace

std::int64_t encode_huffman(const std::uint8_t* bytes, std::int64_t count, int alphabet, std::uint8_t* code,
                            std::int64_t most) {
  const Counts counts = counted(bytes, count);
  const Lengths lengths = count == 0 ? Lengths{} : lengths_of(counts, count);
  std::uint64_t bits = 0;
  for (std::size_t byte = 0; byte < kAlphabet; ++byte)
    bits += static_cast<std::uint64_t>(counts[byte]) * lengths[byte];
  // Each stream may end within a byte, which is 4 bytes at most: with the 8 of write_stream() less than the
  // slack.
  const auto least = huffman_head_bytes(alphabet) + static_cast<std::int64_t>((bits + 7) / 8);
  if (least > most) return 0;
  const ByteCodes codes = codes_of(lengths);
  for (int pair = 0; pair < alphabet / 2; ++pair) {
    const auto low = static_cast<std::size_t>(2 * pair);
    code[pair] = static_cast<std::uint8_t>(lengths[low] | lengths[low + 1] << 4U);
  }
  std::uint8_t* end = code + huffman_head_bytes(alphabet);
  for (int stream = 0; stream < kStreams; ++stream) {
    const std::int64_t first = begin_of_stream(count, stream), last = begin_of_stream(count, stream + 1);
    std::uint8_t* const begin = end;
    if (last > first) end = write_stream(bytes + first, last - first, codes, begin);
    const auto size = static_cast<std::uint32_t>(end - begin);
    if (stream < kStreams - 1) std::memcpy(code + alphabet / 2 + stream * 4, &size, sizeof size);
  }
  return end - code <= most ? end - code : 0;
}

const char* decode_huffman(const std::uint8_t* code, std::int64_t size, int alphabet, std::uint8_t* bytes,
                           std::int64_t count) {
  if (size < huffman_head_bytes(alphabet)) return "it ends within its table";
  Table table;
  if (count > 0) {
    if (const char* const wrong = read_table(code, alphabet, table)) return wrong;
  }
  std::array<Stream, kStreams> streams;
  const std::uint8_t* from = code + huffman_head_bytes(alphabet);
  const std::uint8_t* const end = code + size;
  for (int number = 0; number < kStreams; ++number) {
    auto of_stream = static_cast<std::uint32_t>(end - from);
    if (number < kStreams - 1) std::memcpy(&of_stream, code + alphabet / 2 + number * 4, sizeof of_stream);
    if (of_stream > end - from) return "it ends within a stream of codes";
    Stream& stream = streams[static_cast<std::size_t>(number)];
    stream.from = from;
    stream.end = from += of_stream;
    stream.to = bytes + begin_of_stream(count, number);
    stream.last = bytes + begin_of_stream(count, number + 1);
  }
  const auto may_go_on = [&] {
    return std::all_of(streams.begin(), streams.end(),
                       [](const Stream& each) { return each.may_take_at_once(); });
  };
  while (may_go_on()) {
    for (Stream& each : streams) each.refill();
    for (int k = 0; k < kAtOnce; ++k) {
      for (Stream& each : streams) each.take(table);
    }
  }
  for (Stream& each : streams) {
    if (const char* const wrong = each.finish(table)) return wrong;
  }
  return nullptr;
}

}  // namespace reef::kernels
