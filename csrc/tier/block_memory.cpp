#include "tier/block_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <new>

#include "round_up.h"
#include "tier/swap_file.h"

namespace reef {

BlockMemory::BlockMemory(int count, std::uint64_t block_bytes) : block_bytes_(block_bytes) {
  constexpr std::uint64_t kHugePageBytes = std::uint64_t{2} << 20;
  const std::uint64_t bytes = static_cast<std::uint64_t>(count) * block_bytes;
  const bool huge = bytes >= kHugePageBytes;
  const std::uint64_t alignment = huge ? kHugePageBytes : SwapFile::kAlignment;
  memory_.reset(std::aligned_alloc(alignment, round_up(bytes, alignment)));
  if (memory_ == nullptr) throw std::bad_alloc();
  if (huge) ::madvise(memory_.get(), bytes, MADV_HUGEPAGE);  // an advice: refused, the memory is as good
}

void BlockMemory::Free::operator()(void* memory) const { std::free(memory); }

}  // namespace reef
