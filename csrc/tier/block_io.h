#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "reef/tier.h"
#include "tier/swap_file.h"

namespace reef {

/// One page on its way between memory and the file, in blocks.
struct PageTransfer {
  bool writes = false;
  std::uint64_t offset = 0;  ///< in the file; aligned
  std::uint64_t bytes = 0;   ///< aligned
  /// Fills a block that is to be written, or takes one that was read. Any thread.
  std::function<void(std::uint64_t index, void* block)> work;
};

/// How blocks are moved.
class BlockIo {
 public:
  virtual ~BlockIo() = default;
  /// Returns when all blocks are moved. The first exception stops what has not begun and is rethrown when
  /// nothing is under way any more. Several threads may call at once.
  virtual void move(const PageTransfer& page) = 0;
};

std::unique_ptr<BlockIo> threaded_io(SwapFile& file, const DiskTierOptions& options);
/// Throws ConfigError where there is no io_uring.
std::unique_ptr<BlockIo> uring_io(SwapFile& file, const DiskTierOptions& options);

}  // namespace reef
