#include "tier/block_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "tier/swap_file.h"

namespace reef {

void FreeBlock::operator()(void* block) const { std::free(block); }

BlockMemory block_memory(std::uint64_t block_bytes) {
  constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;
  const bool huge = block_bytes % kHugePageBytes == 0;
  BlockMemory block(std::aligned_alloc(huge ? kHugePageBytes : SwapFile::kAlignment, block_bytes));
  if (block == nullptr) throw std::bad_alloc();
  if (huge) ::madvise(block.get(), block_bytes, MADV_HUGEPAGE);  // an advice: refused, the memory is as good
  return block;
}

}  // namespace reef
