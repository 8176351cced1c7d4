// Packed levels in an entropy code: the same bits again, how long it is, and bytes that are no code.
#include "kernels/level_code.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/packed_levels/blocks.h"
#include "support/guarded_bytes.h"

namespace reef::kernels {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;
using test::GuardedBytes;

Bytes packed(const Floats& values, int bits) {
  const auto elements = static_cast<std::int64_t>(values.size());
  Bytes all(static_cast<std::size_t>(packed_bytes(elements, bits)));
  encode_levels(values.data(), elements, bits, /*key=*/7, all.data());
  return all;
}

/// Blocks with the step 1 whose elements have these codes.
Bytes packed_codes(std::int64_t blocks, int bits, const std::function<int(std::int64_t)>& code) {
  const std::int64_t block_bytes = packed_bytes(kLevelBlock, bits);
  Bytes all(static_cast<std::size_t>(blocks * block_bytes));
  const float half = 0.5F;
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::array<std::uint8_t, kLevelBlock> codes{};
    for (std::int64_t i = 0; i < kLevelBlock; ++i)
      codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(code(block * kLevelBlock + i));
    std::memcpy(all.data() + block * block_bytes, &half, sizeof half);
    packed_blocks().pack(codes.data(), bits, all.data() + block * block_bytes + sizeof half);
  }
  return all;
}

std::int64_t blocks_of(const Bytes& packed, int bits) {
  return static_cast<std::int64_t>(packed.size()) / packed_bytes(kLevelBlock, bits);
}

Bytes encoded(const Bytes& packed, int bits) {
  const std::int64_t blocks = blocks_of(packed, bits), most = most_level_code_bytes(blocks, bits);
  const GuardedBytes from(packed), to(static_cast<std::size_t>(most));
  const std::int64_t size = encode_level_code(from.data(), blocks, bits, to.data());
  EXPECT_LE(size, most);
  return {to.data(), to.data() + size};
}

/// Returns what is wrong, or "".
std::string decoded(const Bytes& code, int bits, Bytes& packed) {
  const GuardedBytes from(code), to(packed.size());
  const char* const wrong = decode_level_code(from.data(), static_cast<std::int64_t>(code.size()),
                                              blocks_of(packed, bits), bits, to.data());
  packed = to.copy();
  return wrong == nullptr ? "" : wrong;
}

Bytes expect_the_same_again(const Bytes& packed, int bits, const std::string& row) {
  const Bytes code = encoded(packed, bits);
  Bytes found(packed.size(), 77);
  EXPECT_EQ(decoded(code, bits, found), "") << row;
  EXPECT_TRUE(found == packed) << row;
  return code;
}

Floats gradient(std::int64_t elements, unsigned seed, const std::string& kind) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<std::size_t>(elements));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float one = normal(random);
    values[i] = kind == "gaussian"       ? one
                : kind == "heavy tails"  ? one * std::exp2(2 * normal(random))
                : kind == "hardly any"   ? (random() % 300 == 0 ? one : 0.0F)
                : kind == "whole blocks" ? (i / kLevelBlock % 3 == 0 ? one : 0.0F)
                : kind == "denormal"     ? one * 1e-42F
                                         : 0.0F;
    if (kind == "not finite" && i % 3000 == 7) values[i] = i % 2 == 0 ? INFINITY : NAN;
  }
  return values;
}
const std::vector<std::string> kKinds = {"gaussian", "heavy tails", "hardly any", "whole blocks",
                                         "denormal", "zeros",       "not finite"};

TEST(LevelCode, GradientsLevelsAreTheSameAgain) {
  for (int bits = 2; bits <= 8; ++bits) {
    for (const std::int64_t elements : {0, 1, 511, 512, 513, 5000, 64 * 512, 64 * 512 + 1, 200000}) {
      for (const std::string& kind : kKinds) {
        const Bytes all = packed(gradient(elements, 3, kind), bits);
        expect_the_same_again(all, bits,
                              kind + ", " + std::to_string(bits) + " bits of " + std::to_string(elements));
      }
    }
  }
}

// Round trips of every kind of levels, for each number of blocks.
TEST(LevelCode, AnyLevelsAreTheSameAgain) {
  for (int bits = 2; bits <= 8; ++bits) {
    const int most = (1 << bits) - 2;
    for (std::int64_t blocks = 0; blocks <= 200;
         blocks += blocks < 5 || blocks == 63 || blocks == 64 ? 1 : 29) {
      std::mt19937 random(static_cast<unsigned>(blocks));
      const std::map<std::string, std::function<int(std::int64_t)>> rows = {
          {"zero", [&](std::int64_t) { return most / 2; }},
          {"lowest", [&](std::int64_t) { return 0; }},
          {"highest", [&](std::int64_t) { return most; }},
          {"all", [&](std::int64_t i) { return static_cast<int>(i % (most + 1)); }},
          {"in turn", [&](std::int64_t i) { return i % 2 == 0 ? 0 : most; }},
          {"one other", [&](std::int64_t i) { return i == 300 ? most : most / 2; }},
          {"by chance", [&](std::int64_t) { return static_cast<int>(random() % unsigned(most + 1)); }}};
      for (const auto& [name, code] : rows) {
        expect_the_same_again(
            packed_codes(blocks, bits, code), bits,
            name + ", " + std::to_string(bits) + " bits, " + std::to_string(blocks) + " blocks");
      }
    }
  }
}

// Levels that no code makes shorter are sent as they are packed, which takes exactly the most bytes.
TEST(LevelCode, IsNeverLongerThanTheMost) {
  std::mt19937 random(1);
  for (int bits = 2; bits <= 8; ++bits) {
    for (const std::int64_t blocks : {1, 64, 65, 130}) {
      const Bytes all =
          packed_codes(blocks, bits, [&](std::int64_t) { return int(random() % (1U << bits)); });
      const std::int64_t most = blocks * (4 + 64 * bits) + (blocks + 63) / 64 * 4;
      EXPECT_EQ(most_level_code_bytes(blocks, bits), most);
      EXPECT_EQ(static_cast<std::int64_t>(expect_the_same_again(all, bits, "by chance").size()), most)
          << bits;
    }
  }
}

// Huffman's bound: of each symbol at most a bit above its entropy. And zeros take their steps alone.
TEST(LevelCode, IsAsShortAsTheEntropyLets) {
  for (int bits = 2; bits <= 8; ++bits) {
    const int in_symbol = 8 / bits;
    for (const char* const kind : {"gaussian", "heavy tails", "hardly any"}) {
      const std::int64_t blocks = 128;
      const Bytes all = packed(gradient(blocks * kLevelBlock, 9, kind), bits);
      std::vector<double> counts(1U << bits);
      for (std::int64_t block = 0; block < blocks; ++block) {
        std::array<std::uint8_t, kLevelBlock> codes{};
        packed_blocks().unpack(all.data() + block * packed_bytes(kLevelBlock, bits) + 4, bits, codes.data());
        for (const std::uint8_t code : codes) ++counts[code];
      }
      double entropy = 0;
      for (const double count : counts) {
        const double share = count / double(blocks * kLevelBlock);
        entropy -= count > 0 ? share * std::log2(share) : 0;
      }
      const auto size = double(expect_the_same_again(all, bits, kind).size());
      const double heads = double(blocks) * 4 + 2 * (4 + 128 + 12 + 4);
      const double elements = double(blocks * kLevelBlock);
      EXPECT_LE(size, heads + elements * (entropy + 1.0 / in_symbol) / 8) << kind << ", " << bits;
      EXPECT_LT(size, double(all.size())) << kind << ", " << bits;
    }
    const Bytes zeros = packed(Floats(130 * 512), bits);
    EXPECT_EQ(encoded(zeros, bits).size(), 130U * 4 + 3 * 4);
  }
}

TEST(LevelCode, WhatIsCutOffIsRefused) {
  for (const int bits : {2, 3, 8}) {
    for (const std::int64_t elements : {512, 512 * 66}) {
      const Bytes all = packed(gradient(elements, 2, "heavy tails"), bits), code = encoded(all, bits);
      for (std::size_t size = 0; size < code.size(); size += size < 700 ? 1 : 97) {
        Bytes found(all.size());
        EXPECT_NE(decoded(Bytes(code.begin(), code.begin() + static_cast<std::ptrdiff_t>(size)), bits, found),
                  "");
      }
      Bytes longer = code, found(all.size());
      longer.push_back(0);
      EXPECT_NE(decoded(longer, bits, found), "");
    }
  }
}

// A body that is too short for its steps, or has more than them where none is above 0.
TEST(LevelCode, ABodyHasItsSteps) {
  for (std::uint8_t size = 1; size < 100; ++size) {
    for (const std::uint8_t fill : {0, 17}) {
      Bytes code(4U + size, fill), found(2 * static_cast<std::size_t>(packed_bytes(kLevelBlock, 4)));
      std::memset(code.data(), 0, 4);
      code.front() = size;
      const std::string wrong = decoded(code, 4, found);
      EXPECT_EQ(wrong, size < 8     ? "it ends within its steps"
                       : fill > 0   ? "it ends within its table"
                       : size == 8U ? ""
                                    : "it has levels where no block has a step")
          << int(size);
    }
  }
}

// Whatever the bytes are, what is read and written stays within bounds. What is not refused can be added up.
TEST(LevelCode, WhatIsNoCodeStaysWithinBounds) {
  std::mt19937 random(3);
  int refused = 0;
  for (int turn = 0; turn < 3000; ++turn) {
    const int bits = 2 + turn % 7;
    const std::int64_t elements = 512 * static_cast<std::int64_t>(1 + random() % (turn % 10 == 0 ? 130 : 6));
    const Bytes all = packed(gradient(elements, random(), kKinds[random() % kKinds.size()]), bits);
    Bytes code = encoded(all, bits);
    const std::size_t heads = std::min<std::size_t>(code.size(), turn % 3 == 0 ? 16 : code.size());
    for (unsigned change = 0; change <= random() % 5; ++change)
      code[random() % heads] = static_cast<std::uint8_t>(random());
    if (turn % 5 == 0)
      std::generate(code.begin(), code.end(), [&] { return static_cast<std::uint8_t>(random()); });
    if (turn % 7 == 0) code.resize(random() % (2 * code.size()));
    Bytes found(all.size());
    const bool is_refused = !decoded(code, bits, found).empty();
    refused += is_refused ? 1 : 0;
    if (is_refused) continue;
    Floats values(static_cast<std::size_t>(elements));
    sum_of_packed({found.data()}, bits, elements, values.data());
  }
  EXPECT_GT(refused, 1500);
}

}  // namespace
}  // namespace reef::kernels
