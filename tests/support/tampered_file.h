#pragma once

// A swap file whose every answer from the kernel passes through a test, whichever way blocks are moved; and
// what io_uring must keep to is checked as it goes: nobody touches a block that is the kernel's.

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/config_error.h"
#include "tier/swap_file.h"
#include "tier/uring.h"

namespace reef::test {

/// How a disk tier's blocks are moved. The last needs no io_uring: transfers are made by plain calls when
/// they are waited for, the last begun first.
enum class Way : std::uint8_t { kThreads, kUring, kUringPretended };
constexpr Way kWays[] = {Way::kThreads, Way::kUring, Way::kUringPretended};

inline const char* name_of(Way way) {
  const char* names[] = {"threads", "uring", "uring_pretended"};
  return names[static_cast<int>(way)];
}
inline DiskIo io_of(Way way) { return way == Way::kThreads ? DiskIo::kThreads : DiskIo::kUring; }

/// Why it cannot be tested here; empty if it can.
inline std::string obstacle(Way way) {
  if (way != Way::kUring) return "";
  return config_error([] {
    disk_tier({.directory = std::filesystem::temp_directory_path().string(),
               .capacity_bytes = 4096,
               .io = DiskIo::kUring});
  });
}

class TamperedFile : public SwapFile {
 public:
  explicit TamperedFile(Way way, bool direct = true)
      : SwapFile(std::filesystem::temp_directory_path().string(), direct), way_(way) {}

 protected:
  struct Call {
    bool writes;
    void* data;
    std::size_t bytes;
    off_t offset;
  };
  /// What the tier is told of a transfer for which the kernel said `result`: bytes, or -errno.
  virtual ssize_t answer(const Call& /*call*/, ssize_t result) { return result; }
  /// 0, or the errno with which io_uring does not begin a transfer.
  virtual int refusal() { return 0; }

  ssize_t sys_pwrite(const void* data, std::size_t bytes, off_t offset) final {
    return told({true, const_cast<void*>(data), bytes, offset});
  }
  ssize_t sys_pread(void* data, std::size_t bytes, off_t offset) final {
    return told({false, data, bytes, offset});
  }
  std::unique_ptr<Uring> sys_uring(const std::vector<iovec>& blocks) override {
    return std::make_unique<Ring>(*this, blocks, way_ == Way::kUring ? SwapFile::sys_uring(blocks) : nullptr);
  }

 private:
  class Ring final : public Uring {
   public:
    Ring(TamperedFile& file, std::vector<iovec> blocks, std::unique_ptr<Uring> kernel)
        : file_(file), blocks_(std::move(blocks)), kernel_(std::move(kernel)) {}
    ~Ring() override { EXPECT_TRUE(begun_.empty()) << "a ring is gone, its transfers are not"; }

    int submit(const Transfer& transfer) noexcept override {
      EXPECT_FALSE(refused_) << "something was submitted after a refusal";
      int error_number = file_.refusal();
      if (error_number == 0 && kernel_) error_number = kernel_->submit(transfer);
      refused_ = error_number != 0;
      if (refused_) return error_number;
      file_.lend(blocks_[transfer.block].iov_base);
      begun_.push_back({transfer, content(transfer)});
      return 0;
    }

    Completion wait() noexcept override {
      EXPECT_FALSE(begun_.empty()) << "nothing to wait for";
      Completion completion{begun_.back().transfer.block, 0};
      if (kernel_) completion = kernel_->wait();
      const auto found = std::find_if(begun_.begin(), begun_.end(), [&](const Begun& one) {
        return one.transfer.block == completion.block;
      });
      const auto [transfer, before] = *found;
      begun_.erase(found);
      const Call call{transfer.writes, blocks_[transfer.block].iov_base, transfer.bytes,
                      static_cast<off_t>(transfer.offset)};
      EXPECT_EQ(call.writes ? content(transfer) : before, before) << "a block was changed under the kernel";
      if (!kernel_) completion.result = static_cast<int>(file_.plain(call));
      completion.result = static_cast<int>(file_.answer(call, completion.result));
      file_.take_back(call.data);
      return completion;
    }

   private:
    struct Begun {
      Transfer transfer;
      std::size_t content;
    };
    std::size_t content(const Transfer& transfer) const {
      if (!transfer.writes) return 0;
      return std::hash<std::string_view>()(
          {static_cast<const char*>(blocks_[transfer.block].iov_base), transfer.bytes});
    }

    TamperedFile& file_;
    std::vector<iovec> blocks_;
    std::unique_ptr<Uring> kernel_;
    std::vector<Begun> begun_;
    bool refused_ = false;
  };

  ssize_t plain(const Call& call) {
    const ssize_t result = call.writes ? SwapFile::sys_pwrite(call.data, call.bytes, call.offset)
                                       : SwapFile::sys_pread(call.data, call.bytes, call.offset);
    return result < 0 ? -errno : result;
  }
  ssize_t told(const Call& call) {
    const ssize_t result = answer(call, plain(call));
    if (result >= 0) return result;
    errno = static_cast<int>(-result);
    return -1;
  }
  void lend(void* block) {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(lent_.insert(block).second) << "one block, two transfers";
  }
  void take_back(void* block) {
    const std::lock_guard lock(mutex_);
    lent_.erase(block);
  }

  Way way_;
  std::mutex mutex_;
  std::set<void*> lent_;
};

}  // namespace reef::test
