#include <algorithm>

#include "tier/block_io.h"
#include "tier/block_workers.h"

namespace reef {
namespace {

class ThreadedIo final : public BlockIo {
 public:
  ThreadedIo(SwapFile& file, const DiskTierOptions& options)
      : file_(file), block_bytes_(options.block_bytes), workers_(options.threads, options.block_bytes) {}

  void move(const PageTransfer& page) override {
    workers_.for_each((page.bytes - 1) / block_bytes_ + 1, [&](std::uint64_t index, void* block) {
      const std::uint64_t begin = index * block_bytes_;
      const std::uint64_t bytes = std::min(block_bytes_, page.bytes - begin);
      if (page.writes) {
        page.work(index, block);
        file_.write(block, bytes, page.offset + begin);
      } else {
        file_.read(block, bytes, page.offset + begin);
        page.work(index, block);
      }
    });
  }

 private:
  SwapFile& file_;
  std::uint64_t block_bytes_;
  BlockWorkers workers_;
};

}  // namespace

std::unique_ptr<BlockIo> threaded_io(SwapFile& file, const DiskTierOptions& options) {
  return std::make_unique<ThreadedIo>(file, options);
}

}  // namespace reef
