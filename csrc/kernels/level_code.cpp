#include "kernels/level_code.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels/huffman.h"
#include "kernels/packed_levels/blocks.h"
#include "kernels/parallel.h"

namespace reef::kernels {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::int64_t kStepBytes = sizeof(float);
constexpr std::int64_t kSizeBytes = sizeof(std::uint32_t);

// The layout of blocks of `bits`, and how their levels become symbols.
struct Width {
  explicit Width(int of) : bits(of) {}
  int bits;
  std::int64_t block_bytes = packed_bytes(kLevelBlock, bits);
  std::int64_t symbols = kLevelBlock / (8 / bits);  ///< of a block
  int alphabet = 1 << (8 / bits * bits);

  void to_symbols(const std::uint8_t* levels, std::uint8_t* to) const {
    if (8 % bits == 0) {
      std::memcpy(to, levels, static_cast<std::size_t>(symbols));
    } else if (bits == 3) {
      std::uint8_t codes[kLevelBlock];
      packed_blocks().unpack(levels, bits, codes);
      for (std::int64_t i = 0; i < symbols; ++i)
        to[i] = static_cast<std::uint8_t>(codes[i] | codes[i + symbols] << 3U);
    } else {
      packed_blocks().unpack(levels, bits, to);
    }
  }
  void from_symbols(const std::uint8_t* from, std::uint8_t* levels) const {
    if (8 % bits == 0) {
      std::memcpy(levels, from, static_cast<std::size_t>(symbols));
    } else if (bits == 3) {
      std::uint8_t codes[kLevelBlock];
      for (std::int64_t i = 0; i < symbols; ++i) {
        codes[i] = from[i] & 7U;
        codes[i + symbols] = from[i] >> 3U;
      }
      packed_blocks().pack(codes, bits, levels);
    } else {
      packed_blocks().pack(from, bits, levels);
    }
  }
  // Writes the levels of a block without a step: every level is zero.
  void zero_levels(std::uint8_t* levels) const {
    std::uint8_t codes[kLevelBlock];
    std::memset(codes, (1 << (bits - 1)) - 1, sizeof codes);
    packed_blocks().pack(codes, bits, levels);
  }
};

bool has_step(const std::uint8_t* half_step) {
  float half;
  std::memcpy(&half, half_step, sizeof half);
  return half > 0;
}

// A thread's memory, which it uses for one body after another.
struct Scratch {
  explicit Scratch(const Width& width)
      : symbols(static_cast<std::size_t>(kLevelCodeBlocks * width.symbols)),
        body(static_cast<std::size_t>(kLevelCodeBlocks * width.block_bytes + kHuffmanSlack)) {}
  Bytes symbols, body;
};

// Encodes a body into `scratch` and returns its bytes, or 0 if it would not be shorter than the blocks.
std::int64_t encode_body(const std::uint8_t* packed, std::int64_t blocks, const Width& width,
                         Scratch& scratch) {
  std::uint8_t* symbol = scratch.symbols.data();
  for (std::int64_t block = 0; block < blocks; ++block, packed += width.block_bytes) {
    std::memcpy(scratch.body.data() + block * kStepBytes, packed, kStepBytes);
    if (!has_step(packed)) continue;
    width.to_symbols(packed + kStepBytes, symbol);
    symbol += width.symbols;
  }
  const std::int64_t count = symbol - scratch.symbols.data(), steps = blocks * kStepBytes;
  if (count == 0) return steps;
  const std::int64_t most = blocks * width.block_bytes - 1 - steps;
  const std::int64_t coded =
      encode_huffman(scratch.symbols.data(), count, width.alphabet, scratch.body.data() + steps, most);
  return coded == 0 ? 0 : steps + coded;
}

const char* decode_body(const std::uint8_t* body, std::int64_t size, std::int64_t blocks, const Width& width,
                        std::uint8_t* packed, Bytes& symbols) {
  const std::int64_t steps = blocks * kStepBytes;
  if (size < steps) return "it ends within its steps";
  std::int64_t count = 0;
  for (std::int64_t block = 0; block < blocks; ++block)
    count += has_step(body + block * kStepBytes) ? width.symbols : 0;
  if (count > 0) {
    const char* const wrong =
        decode_huffman(body + steps, size - steps, width.alphabet, symbols.data(), count);
    if (wrong != nullptr) return wrong;
  } else if (size > steps) {
    return "it has levels where no block has a step";
  }
  const std::uint8_t* symbol = symbols.data();
  for (std::int64_t block = 0; block < blocks; ++block, packed += width.block_bytes) {
    std::memcpy(packed, body + block * kStepBytes, kStepBytes);
    if (!has_step(packed)) {
      width.zero_levels(packed + kStepBytes);
      continue;
    }
    width.from_symbols(symbol, packed + kStepBytes);
    symbol += width.symbols;
  }
  return nullptr;
}

std::int64_t bodies_of(std::int64_t blocks) { return (blocks + kLevelCodeBlocks - 1) / kLevelCodeBlocks; }
std::int64_t blocks_of(std::int64_t body, std::int64_t blocks) {
  return std::min(kLevelCodeBlocks, blocks - body * kLevelCodeBlocks);
}
std::uint32_t size_at(const std::uint8_t* code, std::int64_t body) {
  std::uint32_t size;
  std::memcpy(&size, code + body * kSizeBytes, sizeof size);
  return size;
}

}  // namespace

// Encodes bodies side by side, each at the place it has if none before it becomes shorter, and then closes
// the gaps.
std::int64_t encode_level_code(const std::uint8_t* packed, std::int64_t blocks, int bits,
                               std::uint8_t* code) {
  const Width width(bits);
  const std::int64_t bodies = bodies_of(blocks), whole = kLevelCodeBlocks * width.block_bytes;
  std::uint8_t* const first = code + bodies * kSizeBytes;
  parallel_for(0, bodies, 1, [&](std::int64_t begin, std::int64_t end) {
    Scratch scratch(width);
    for (std::int64_t body = begin; body < end; ++body) {
      const std::int64_t count = blocks_of(body, blocks);
      const auto size = static_cast<std::uint32_t>(encode_body(packed + body * whole, count, width, scratch));
      std::memcpy(code + body * kSizeBytes, &size, sizeof size);
      const auto bytes = size == 0 ? static_cast<std::size_t>(count * width.block_bytes) : size;
      std::memcpy(first + body * whole, size == 0 ? packed + body * whole : scratch.body.data(), bytes);
    }
  });
  std::uint8_t* to = first;
  for (std::int64_t body = 0; body < bodies; ++body) {
    const std::uint32_t size = size_at(code, body);
    const std::int64_t bytes = size == 0 ? blocks_of(body, blocks) * width.block_bytes : size;
    std::memmove(to, first + body * whole, static_cast<std::size_t>(bytes));
    to += bytes;
  }
  return to - code;
}

const char* decode_level_code(const std::uint8_t* code, std::int64_t size, std::int64_t blocks, int bits,
                              std::uint8_t* packed) {
  const Width width(bits);
  const std::int64_t bodies = bodies_of(blocks);
  if (size < bodies * kSizeBytes) return "it ends within the sizes of its bodies";
  std::vector<std::int64_t> begins = {bodies * kSizeBytes};
  for (std::int64_t body = 0; body < bodies; ++body) {
    const std::uint32_t of_body = size_at(code, body);
    begins.push_back(begins.back() + (of_body == 0 ? blocks_of(body, blocks) * width.block_bytes : of_body));
  }
  if (begins.back() != size) return "its bodies have another size than it";
  std::atomic<const char*> wrong = nullptr;
  parallel_for(0, bodies, 1, [&](std::int64_t begin, std::int64_t end) {
    Bytes symbols(static_cast<std::size_t>(kLevelCodeBlocks * width.symbols));
    for (std::int64_t body = begin; body < end; ++body) {
      const std::uint8_t* const from = code + begins[static_cast<std::size_t>(body)];
      std::uint8_t* const to = packed + body * kLevelCodeBlocks * width.block_bytes;
      const std::int64_t count = blocks_of(body, blocks);
      if (const std::uint32_t of_body = size_at(code, body); of_body == 0) {
        std::memcpy(to, from, static_cast<std::size_t>(count * width.block_bytes));
      } else if (const char* const why = decode_body(from, of_body, count, width, to, symbols)) {
        wrong = why;
      }
    }
  });
  return wrong;
}

}  // namespace reef::kernels
