#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <vector>

#include "fork.h"
#include "reef/error.h"
#include "tier/block_io.h"
#include "tier/block_memory.h"
#include "tier/uring.h"

namespace reef {
namespace {

// The blocks that all callers share.
class SharedBlocks {
 public:
  SharedBlocks(int count, std::uint64_t block_bytes) : memory_(count, block_bytes) {
    for (int i = 0; i < count; ++i) {
      all_.push_back({memory_.block(i), block_bytes});
      free_.push_back(static_cast<std::size_t>(i));
    }
  }

  const std::vector<iovec>& all() const { return all_; }

  // For a caller that has none; first come, first served.
  std::size_t take() {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::uint64_t turn = next_turn_++;
    freed_.wait(lock, [&] { return turn == turn_ && !free_.empty(); });
    ++turn_;
    freed_.notify_all();
    return pop();
  }
  // One more, unless others wait for it.
  std::optional<std::size_t> try_take() {
    const std::lock_guard lock(mutex_);
    if (turn_ != next_turn_ || free_.empty()) return std::nullopt;
    return pop();
  }
  void give_back(std::size_t block) {
    {
      const std::lock_guard lock(mutex_);
      free_.push_back(block);  // never grows past its first size
    }
    freed_.notify_all();
  }

 private:
  std::size_t pop() {
    const std::size_t block = free_.back();
    free_.pop_back();
    return block;
  }

  BlockMemory memory_;
  std::vector<iovec> all_;
  MutexAtFork mutex_{AtFork::Order::kWorkers};
  std::condition_variable freed_;
  std::vector<std::size_t> free_;
  std::uint64_t turn_ = 0;  ///< of those who wait
  std::uint64_t next_turn_ = 0;
};

// Each call has a ring to itself, so whatever is under way in it is the call's own, and waited for by it.
class UringIo final : public BlockIo, private AtFork {
 public:
  UringIo(SwapFile& file, const DiskTierOptions& options)
      : AtFork(Order::kWorkers),
        file_(file),
        block_bytes_(options.block_bytes),
        blocks_(options.threads, options.block_bytes) {
    idle_.push_back(file_.uring(blocks_.all()));
  }

  void move(const PageTransfer& page) override {
    Call call{.page = page, .indices = std::vector<std::uint64_t>(blocks_.all().size()), .error = nullptr};
    const std::uint64_t count = (page.bytes - 1) / block_bytes_ + 1;
    std::unique_ptr<Uring> ring = take_ring();
    bool whole = ring != nullptr;
    std::size_t under_way = 0;
    for (std::uint64_t next = 0;;) {
      while (next < count && !call.error) {
        const auto block = under_way == 0 ? blocks_.take() : blocks_.try_take();
        if (!block) break;
        call.indices[*block] = next++;
        if (!fill(call, *block)) continue;
        if (whole && ring->submit(transfer_of(call, *block)) == 0) {
          ++under_way;
        } else {
          whole = false;
          finish(call, {*block, -EAGAIN});
        }
      }
      if (under_way == 0) break;
      const Uring::Completion completion = ring->wait();
      --under_way;
      finish(call, completion);
    }
    if (whole) give_back(std::move(ring));
    if (call.error) std::rethrow_exception(call.error);
  }

 private:
  struct Call {
    const PageTransfer& page;
    std::vector<std::uint64_t> indices;  ///< in the page, of each block
    std::exception_ptr error;            ///< the first
  };

  Uring::Transfer transfer_of(const Call& call, std::size_t block) const {
    const std::uint64_t begin = call.indices[block] * block_bytes_;
    return {.writes = call.page.writes,
            .block = block,
            .bytes = std::min(block_bytes_, call.page.bytes - begin),
            .offset = call.page.offset + begin};
  }

  // False, and the block is free again, if it could not be filled.
  bool fill(Call& call, std::size_t block) {
    if (!call.page.writes) return true;
    try {
      call.page.work(call.indices[block], blocks_.all()[block].iov_base);
      return true;
    } catch (...) {
      call.error = std::current_exception();
      blocks_.give_back(block);
      return false;
    }
  }

  // What the ring left undone without an error, wholly or in part, is done by plain calls.
  void finish(Call& call, Uring::Completion completion) {
    const auto [block, result] = completion;
    const Uring::Transfer transfer = transfer_of(call, block);
    char* data = static_cast<char*>(blocks_.all()[block].iov_base);
    try {
      if (result < 0 && result != -EAGAIN && result != -EINTR) {
        file_.fail(transfer.writes ? "write" : "read", -result, transfer.bytes);
      }
      const auto done = static_cast<std::uint64_t>(std::max(result, 0));
      if (transfer.writes) {
        file_.write(data + done, transfer.bytes - done, transfer.offset + done);
      } else {
        file_.read(data + done, transfer.bytes - done, transfer.offset + done);
        call.page.work(call.indices[block], data);
      }
    } catch (...) {
      if (!call.error) call.error = std::current_exception();
    }
    blocks_.give_back(block);
  }

  void before_fork() override { mutex_.lock(); }
  void after_fork_in_parent() override { mutex_.unlock(); }
  // A ring is memory that the parent and the kernel share: the child touches none, not even to close it.
  void after_fork_in_child() override {
    inherited_ = true;
    for (auto& ring : idle_) (void)ring.release();
    idle_.clear();
    mutex_.unlock();
  }

  // Null if no further ring can be had: plain calls do.
  std::unique_ptr<Uring> take_ring() {
    {
      const std::lock_guard lock(mutex_);
      if (inherited_) return nullptr;
      if (!idle_.empty()) {
        std::unique_ptr<Uring> ring = std::move(idle_.back());
        idle_.pop_back();
        return ring;
      }
    }
    try {
      return file_.uring(blocks_.all());
    } catch (const ConfigError&) {
      return nullptr;
    }
  }

  void give_back(std::unique_ptr<Uring> ring) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(ring));
  }

  SwapFile& file_;
  std::uint64_t block_bytes_;
  SharedBlocks blocks_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Uring>> idle_;  ///< nothing under way
  bool inherited_ = false;                    ///< by a forked child
};

}  // namespace

std::unique_ptr<BlockIo> uring_io(SwapFile& file, const DiskTierOptions& options) {
  return std::make_unique<UringIo>(file, options);
}

}  // namespace reef
