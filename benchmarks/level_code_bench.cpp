// Measures an entropy code of QSGD's levels: bits an element beside fixed width, the code of QSGD's paper and
// the entropy of the levels, and the time that coding takes on one thread.
#include "kernels/level_code.h"

#include <ATen/Parallel.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "harness.h"
#include "kernels/packed_levels/blocks.h"

namespace {

using reef::bench::in_turn;
using reef::bench::print;
using reef::bench::Result;
using namespace reef::kernels;

constexpr std::int64_t kElements = std::int64_t{1} << 20;
constexpr std::int64_t kSlices[] = {2048, 16384, kElements};
constexpr int kRounds = 101;

using Bytes = std::vector<std::uint8_t>;

/// Gaussian, or of tails as of gradients of layers that differ: each is times 2 to the power of a Gaussian.
std::vector<float> gradient(bool heavy_tails) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(kElements));
  for (float& value : values) {
    value = normal(random);
    if (heavy_tails) value *= std::exp2(normal(random));
  }
  return values;
}

/// Of Elias' recursive code of a number from 1 on.
int elias_bits(std::uint32_t number) {
  int bits = 1;
  while (number > 1) {
    const int digits = std::bit_width(number);
    bits += digits;
    number = static_cast<std::uint32_t>(digits - 1);
  }
  return bits;
}

/// What is known of the levels of all blocks, per element.
struct Levels {
  double entropy = 0;  ///< of levels, and the step
  double elias =
      0;  ///< 1610.02132, appendix A.2: of each level that is not zero its distance, sign and level
};
Levels levels_of(const Bytes& packed, int bits) {
  const std::int64_t block_bytes = packed_bytes(kLevelBlock, bits);
  std::vector<double> counts(std::size_t{1} << static_cast<unsigned>(bits));
  double elias = 0;
  const int zero = (1 << (bits - 1)) - 1;
  for (std::size_t begin = 0; begin < packed.size(); begin += static_cast<std::size_t>(block_bytes)) {
    std::uint8_t codes[kLevelBlock];
    packed_blocks().unpack(packed.data() + begin + sizeof(float), bits, codes);
    std::uint32_t distance = 0;
    elias += 32;
    for (const std::uint8_t code : codes) {
      ++counts[code];
      ++distance;
      if (code == zero) continue;
      elias += elias_bits(distance) + 1 + elias_bits(static_cast<std::uint32_t>(std::abs(code - zero)));
      distance = 0;
    }
  }
  Levels levels{32.0 / kLevelBlock, elias / kElements};
  for (const double count : counts) {
    const double share = count / kElements;
    levels.entropy -= count > 0 ? share * std::log2(share) : 0;
  }
  return levels;
}

double bits_of_an_element(const Bytes& packed, int bits, std::int64_t slice) {
  const std::int64_t blocks = slice / kLevelBlock, bytes = packed_bytes(slice, bits);
  Bytes code(static_cast<std::size_t>(most_level_code_bytes(blocks, bits)));
  std::int64_t sum = 0;
  for (std::int64_t first = 0; first < static_cast<std::int64_t>(packed.size()); first += bytes)
    sum += encode_level_code(packed.data() + first, blocks, bits, code.data());
  return 8.0 * static_cast<double>(sum) / kElements;
}

void measure(const std::string& kind, const std::vector<float>& values, int bits) {
  Bytes packed(static_cast<std::size_t>(packed_bytes(kElements, bits)));
  encode_levels(values.data(), kElements, bits, /*key=*/1, packed.data());
  const Levels levels = levels_of(packed, bits);
  for (const std::int64_t slice : kSlices) {
    char context[160];
    std::snprintf(context, sizeof context, "fixed width %.4g, the code of the paper %.4g, entropy %.4g",
                  8.0 * static_cast<double>(packed.size()) / kElements, levels.elias, levels.entropy);
    print("level_code/" + kind + ", " + std::to_string(bits) + " bits, slices of " + std::to_string(slice),
          bits_of_an_element(packed, bits, slice), "bits", context);
  }
  if (kind != "gaussian") return;
  const std::int64_t blocks = kElements / kLevelBlock;
  Bytes code(static_cast<std::size_t>(most_level_code_bytes(blocks, bits))), again(packed.size());
  std::vector<float> sum(values.size());
  std::int64_t size = 0;
  const auto encode = [&] { size = encode_level_code(packed.data(), blocks, bits, code.data()); };
  encode();
  if (decode_level_code(code.data(), size, blocks, bits, again.data()) != nullptr || again != packed) {
    std::fprintf(stderr, "what was encoded is not what is decoded\n");
    std::exit(1);
  }
  const std::vector<Result> results =
      in_turn({{"quantize", {}, [&] { encode_levels(values.data(), kElements, bits, 1, packed.data()); }, {}},
               {"encode", {}, encode, {}},
               {"decode",
                {},
                [&] {
                  if (decode_level_code(code.data(), size, blocks, bits, again.data()) != nullptr)
                    std::exit(1);
                },
                {}},
               {"unpack", {}, [&] { sum_of_packed({packed.data()}, bits, kElements, sum.data()); }, {}}},
              kRounds, kElements);
  const std::string of_bits = "level_code/an element of " + std::to_string(bits) + " bits/";
  for (const Result& result : results) {
    char spread[96];
    std::snprintf(spread, sizeof spread, "median of %d rounds, quartiles %.4g to %.4g", kRounds,
                  result.quantile(0.25), result.quantile(0.75));
    print(of_bits + result.name, result.median(), "ns", spread);
  }
  const double saved = 8 * static_cast<double>(static_cast<std::int64_t>(packed.size()) - size) / kElements;
  print(of_bits + "encode and decode take what is saved at",
        1000 * saved / (results[1].median() + results[2].median()), "Mbit/s",
        "one core, one slice, gaussian");
}

}  // namespace

int main() {
  at::set_num_threads(1);
  for (const bool heavy_tails : {false, true}) {
    const std::vector<float> values = gradient(heavy_tails);
    for (int bits = 2; bits <= 8; ++bits) measure(heavy_tails ? "heavy tails" : "gaussian", values, bits);
  }
}
