#include "kernels/packed_levels.h"

#include <algorithm>

#include "kernels/packed_levels/one_block.h"
#include "kernels/parallel.h"
#include "kernels/random_key.h"

namespace reef::kernels {
namespace {

constexpr std::int64_t kGrain = 64;  // the least of blocks that are worth a thread

// Calls `work(block, first, count)` with its elements.
template <class Work>
void for_each_block(std::int64_t elements, const Work& work) {
  const std::int64_t all = (elements + kLevelBlock - 1) / kLevelBlock;
  parallel_for(0, all, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * kLevelBlock;
      work(block, first, std::min(kLevelBlock, elements - first));
    }
  });
}

}  // namespace

const PackedBlocks& packed_blocks() {
  static const PackedBlocks* const with_avx2 = packed_blocks_with_avx2();
  return with_avx2 != nullptr ? *with_avx2 : kBlocks;
}

void encode_levels(const float* values, std::int64_t elements, int bits, std::uint64_t key,
                   std::uint8_t* packed) {
  const std::int64_t bytes = packed_bytes(kLevelBlock, bits);
  for_each_block(elements, [&](std::int64_t block, std::int64_t first, std::int64_t count) {
    const std::uint64_t of_block = mixed(key + static_cast<std::uint64_t>(block) * kNextKey);
    packed_blocks().encode_levels(values + first, count, bits, of_block, packed + block * bytes);
  });
}

void encode_signs(float* values, std::int64_t elements, std::uint8_t* packed) {
  const std::int64_t bytes = packed_bytes(kLevelBlock, 1);
  for_each_block(elements, [&](std::int64_t block, std::int64_t first, std::int64_t count) {
    packed_blocks().encode_signs(values + first, count, packed + block * bytes);
  });
}

void sum_of_packed(const std::vector<const std::uint8_t*>& parts, int bits, std::int64_t elements,
                   float* to) {
  const std::int64_t bytes = packed_bytes(kLevelBlock, bits);
  for_each_block(elements, [&](std::int64_t block, std::int64_t first, std::int64_t count) {
    std::vector<const std::uint8_t*> of_block = parts;
    for (const std::uint8_t*& part : of_block) part += block * bytes;
    packed_blocks().sum(of_block.data(), static_cast<std::int64_t>(of_block.size()), bits, count, to + first);
  });
}

}  // namespace reef::kernels
