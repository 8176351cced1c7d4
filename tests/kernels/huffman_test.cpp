// Huffman's code of bytes: against a tree that is built and read bit by bit; lengths; and bytes that are no
// code.
#include "kernels/huffman.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/guarded_bytes.h"

namespace reef::kernels {
namespace {

using Bytes = std::vector<std::uint8_t>;
using test::GuardedBytes;

/// Of exactly as many bytes as the code has: an encoder that writes more than it may does not come back.
Bytes encoded(const Bytes& bytes, int alphabet, std::int64_t most = 1 << 20) {
  const GuardedBytes code(static_cast<std::size_t>(most + kHuffmanSlack));
  const std::int64_t size =
      encode_huffman(bytes.data(), static_cast<std::int64_t>(bytes.size()), alphabet, code.data(), most);
  return {code.data(), code.data() + size};
}

/// What is wrong, or "".
std::string decoded(const Bytes& code, int alphabet, Bytes& bytes) {
  const GuardedBytes from(code), to(bytes.size());
  const char* const wrong = decode_huffman(from.data(), static_cast<std::int64_t>(code.size()), alphabet,
                                           to.data(), static_cast<std::int64_t>(bytes.size()));
  bytes = to.copy();
  return wrong == nullptr ? "" : wrong;
}

/// Reads a code as huffman.h describes it, bit by bit.
Bytes read_bit_by_bit(const Bytes& code, int alphabet, std::size_t count) {
  std::map<std::pair<int, std::uint32_t>, std::uint8_t>
      meaning;  // of a length and bits, the first one highest
  std::uint32_t next = 0;
  for (int length = 1; length <= 15; ++length, next *= 2) {
    for (int byte = 0; byte < alphabet; ++byte) {
      if ((code[static_cast<std::size_t>(byte / 2)] >> (byte % 2 * 4) & 15) != length) continue;
      EXPECT_LE(length, kLongestCode);
      meaning[{length, next++}] = static_cast<std::uint8_t>(byte);
    }
  }
  Bytes bytes;
  std::size_t begin = static_cast<std::size_t>(alphabet / 2 + 12);
  for (std::size_t stream = 0; stream < 4; ++stream) {
    const std::size_t last = count * (stream + 1) / 4;
    std::size_t at = 0;
    while (bytes.size() < last) {
      std::uint32_t bits = 0;
      int length = 0;
      while (meaning.find({length, bits}) == meaning.end()) {
        if (length == 15 || begin + at / 8 >= code.size()) return {};
        bits = bits * 2 + (code[begin + at / 8] >> (at % 8) & 1U);
        ++length;
        ++at;
      }
      bytes.push_back(meaning[{length, bits}]);
    }
    begin += (at + 7) / 8;
    if (stream == 3) {
      EXPECT_EQ(begin, code.size());
      continue;
    }
    std::uint32_t size = 0;
    std::memcpy(&size, code.data() + alphabet / 2 + 4 * stream, 4);
    EXPECT_EQ(size, (at + 7) / 8);
  }
  return bytes;
}

/// The bits that Huffman's tree takes without a limit of its depth, and that depth.
std::pair<std::int64_t, int> tree_bits(const Bytes& bytes) {
  std::map<int, std::int64_t> counts;
  for (const std::uint8_t byte : bytes) ++counts[byte];
  using Node = std::pair<std::int64_t, int>;  // weight and depth: of equal ones the flatter one first
  std::priority_queue<Node, std::vector<Node>, std::greater<>> nodes;
  for (const auto& [byte, count] : counts) nodes.push({count, 0});
  if (nodes.size() == 1) return {nodes.top().first, 1};
  std::int64_t bits = 0;
  int depth = 0;
  while (nodes.size() > 1) {
    const Node a = nodes.top();
    nodes.pop();
    const Node b = nodes.top();
    nodes.pop();
    bits += a.first + b.first;
    depth = std::max({depth, a.second + 1, b.second + 1});
    nodes.push({a.first + b.first, std::max(a.second, b.second) + 1});
  }
  return {bits, depth};
}

/// Bytes of which the i-th of the alphabet is so likely.
Bytes drawn(std::size_t count, int alphabet, unsigned seed, const std::function<double(int)>& likely) {
  std::mt19937 random(seed);
  std::vector<double> weights;
  for (int byte = 0; byte < alphabet; ++byte) weights.push_back(likely(byte));
  std::discrete_distribution<int> of(weights.begin(), weights.end());
  Bytes bytes(count);
  std::generate(bytes.begin(), bytes.end(), [&] { return static_cast<std::uint8_t>(of(random)); });
  return bytes;
}

std::vector<Bytes> all_kinds(std::size_t count, int alphabet) {
  const double middle = alphabet / 2.0;
  return {drawn(count, alphabet, 1, [](int) { return 1.0; }),
          drawn(count, alphabet, 2, [&](int i) { return std::exp(-std::pow((i - middle) / middle * 3, 2)); }),
          drawn(count, alphabet, 3, [](int i) { return std::exp2(-i); }),
          drawn(count, alphabet, 4, [](int i) { return i % 7 == 0 ? std::exp(-i / 9.0) : 0.0; }),
          drawn(count, alphabet, 5, [](int i) { return i == 0 ? 1.0 : 1e-4; }),
          Bytes(count, static_cast<std::uint8_t>(alphabet - 1)),
          Bytes(count, 0)};
}

constexpr int kAlphabets[] = {2, 32, 64, 128, 256};

TEST(Huffman, SaysTheSameToWhoeverReadsIt) {
  std::vector<std::size_t> counts = {1000, 4097, 32768};
  for (std::size_t count = 0; count <= 200; ++count) counts.push_back(count);
  for (const std::size_t count : counts) {
    for (const int alphabet : kAlphabets) {
      for (const Bytes& bytes : all_kinds(count, alphabet)) {
        const Bytes code = encoded(bytes, alphabet);
        Bytes found(count, 77);
        ASSERT_EQ(decoded(code, alphabet, found), "") << count << " of " << alphabet;
        ASSERT_EQ(found, bytes) << count << " of " << alphabet;
        if (count > 0) {
          ASSERT_EQ(read_bit_by_bit(code, alphabet, count), bytes) << count << " of " << alphabet;
        }
      }
    }
  }
}

// As many bits as the tree, unless that is deeper than a code may be long; and not a byte more than it may
// have.
TEST(Huffman, TakesTheBitsOfTheTree) {
  for (const std::size_t count : {1U, 2U, 50U, 3000U, 32768U}) {
    for (const int alphabet : kAlphabets) {
      for (const Bytes& bytes : all_kinds(count, alphabet)) {
        const auto size = static_cast<std::int64_t>(encoded(bytes, alphabet).size());
        const auto [bits, depth] = tree_bits(bytes);
        const std::int64_t least = alphabet / 2 + 12 + (bits + 7) / 8;
        EXPECT_GE(size, least) << count << " of " << alphabet;
        EXPECT_LE(static_cast<double>(size),
                  static_cast<double>(least + 3) + (depth <= kLongestCode ? 0 : 0.02 * double(bits) / 8))
            << count << " of " << alphabet << ", depth " << depth;
        EXPECT_EQ(encoded(bytes, alphabet, size).size(), static_cast<std::size_t>(size));
        EXPECT_TRUE(encoded(bytes, alphabet, size - 1).empty());
      }
    }
  }
}

// Counts of which each is the sum of the two before it make the deepest tree that there is.
TEST(Huffman, NoCodeIsLongerThanTheLongest) {
  Bytes bytes;
  for (std::size_t byte = 0, count = 1, next = 1; byte < 24; ++byte) {
    bytes.insert(bytes.end(), count, static_cast<std::uint8_t>(byte * 10));
    next += std::exchange(count, next);
  }
  std::shuffle(bytes.begin(), bytes.end(), std::mt19937(1));
  const auto [bits, depth] = tree_bits(bytes);
  ASSERT_GT(depth, kLongestCode);
  const Bytes code = encoded(bytes, 256);
  EXPECT_EQ(read_bit_by_bit(code, 256, bytes.size()), bytes);  // looks at all lengths
  EXPECT_LE(double(code.size()), 140 + 1.02 * double(bits) / 8);
}

/// The same with so many zeros more at the end of each stream.
Bytes with_zeros_behind(const Bytes& code, int alphabet, const std::array<std::size_t, 4>& more) {
  const auto head = static_cast<std::ptrdiff_t>(alphabet / 2);
  Bytes longer(code.begin(), code.begin() + head + 12);
  auto from = code.begin() + head + 12;
  for (std::size_t stream = 0; stream < 4; ++stream) {
    auto size = static_cast<std::uint32_t>(code.end() - from);
    const auto at = head + static_cast<std::ptrdiff_t>(4 * stream);
    if (stream < 3) std::memcpy(&size, code.data() + at, sizeof size);
    longer.insert(longer.end(), from, from + size);
    longer.insert(longer.end(), more[stream], 0);
    from += size;
    size += static_cast<std::uint32_t>(more[stream]);
    if (stream < 3) std::memcpy(longer.data() + at, &size, sizeof size);
  }
  return longer;
}

// Every part of a code, and every code with something behind one of its streams, is refused.
TEST(Huffman, WhatIsCutOffIsRefused) {
  std::map<std::string, int> told;
  for (const int alphabet : {2, 64, 256}) {
    for (const std::size_t count : {1U, 9U, 300U}) {
      for (const Bytes& bytes : all_kinds(count, alphabet)) {
        const Bytes code = encoded(bytes, alphabet);
        const auto refused = [&](const Bytes& other) {
          Bytes found(count);
          const std::string wrong = decoded(other, alphabet, found);
          EXPECT_NE(wrong, "") << other.size() << " in place of " << code.size();
          ++told[wrong];
        };
        for (std::size_t size = 0; size < code.size(); ++size) {
          const auto end = code.begin() + static_cast<std::ptrdiff_t>(size);
          refused(Bytes(code.begin(), end));
          // The last stream ends there, and no other before it.
          if (size >= static_cast<std::size_t>(alphabet) / 2 + 12) {
            Bytes shorter(code.begin(), end);
            std::fill_n(shorter.begin() + alphabet / 2, 12, std::uint8_t{0});
            refused(shorter);
          }
        }
        for (const std::size_t more : {1UL, 8UL, 64UL}) {
          for (const auto& behind : {std::array{more, 0UL, 0UL, 0UL}, std::array{0UL, more, 0UL, 0UL},
                                     std::array{0UL, 0UL, more, 0UL}, std::array{0UL, 0UL, 0UL, more},
                                     std::array{more, more, more, more}})
            refused(with_zeros_behind(code, alphabet, behind));
        }
      }
    }
  }
  for (const char* const wrong : {"it ends within its table", "it ends within a stream of codes",
                                  "it ends within a code", "it goes on behind its last code"})
    EXPECT_GT(told[wrong], 0) << wrong;
}

// Whatever the bytes are, what is read and written stays within bounds, and what says nothing is refused.
TEST(Huffman, WhatIsNoCodeIsRefused) {
  std::mt19937 random(5);
  int refused = 0, tables = 0;
  for (int turn = 0; turn < 4000; ++turn) {
    const int alphabet = kAlphabets[turn % 5];
    const std::size_t count = random() % 400;
    const Bytes bytes = all_kinds(count, alphabet)[random() % 5];
    Bytes code = encoded(bytes, alphabet);
    if (turn % 4 == 0) {  // only chance
      std::generate(code.begin(), code.end(), [&] { return static_cast<std::uint8_t>(random()); });
    } else {
      for (unsigned change = 0; change <= random() % 4; ++change)
        code[random() % code.size()] ^= static_cast<std::uint8_t>(1U << random() % 8);
    }
    Bytes found(count);
    const std::string wrong = decoded(code, alphabet, found);
    refused += wrong.empty() ? 0 : 1;
    tables += wrong.find("lengths") != std::string::npos ? 1 : 0;
    if (wrong.empty() && count > 0) {
      EXPECT_EQ(read_bit_by_bit(code, alphabet, count), found);
    }
  }
  EXPECT_GT(refused, 2000);
  EXPECT_GT(tables, 500);
}

}  // namespace
}  // namespace reef::kernels
