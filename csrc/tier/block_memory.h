#pragma once

#include <cstdint>
#include <memory>

namespace reef {

struct FreeBlock {
  void operator()(void* block) const;
};
using BlockMemory = std::unique_ptr<void, FreeBlock>;

/// Memory that O_DIRECT accepts, on huge pages where the kernel has them and `block_bytes` fills some: the
/// disk is then told of few long pieces of memory instead of one a page.
BlockMemory block_memory(std::uint64_t block_bytes);

}  // namespace reef
