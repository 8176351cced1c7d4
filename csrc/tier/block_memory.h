#pragma once

#include <cstdint>
#include <memory>

namespace reef {

/// Blocks of memory that O_DIRECT accepts, side by side, on huge pages where the kernel has them: the disk is
/// then told of few long pieces of memory instead of one a page.
class BlockMemory {
 public:
  BlockMemory(int count, std::uint64_t block_bytes);
  void* block(int index) const {
    return static_cast<char*>(memory_.get()) + static_cast<std::uint64_t>(index) * block_bytes_;
  }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::uint64_t block_bytes_;
  std::unique_ptr<void, Free> memory_;
};

}  // namespace reef
