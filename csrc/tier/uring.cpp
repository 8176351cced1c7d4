#include "tier/uring.h"

#include <liburing.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "reef/error.h"

namespace reef {
namespace {

[[noreturn]] void refuse(const std::string& reason) {
  throw ConfigError("disk tier: io_uring is not to be had here: " + reason +
                    "; give io = threads, which gives the same bytes, or automatic");
}

class KernelUring final : public Uring {
 public:
  KernelUring(int descriptor, const std::vector<iovec>& blocks) : descriptor_(descriptor), blocks_(blocks) {
    const auto entries = static_cast<unsigned>(blocks.size());
    if (const int error = ::io_uring_queue_init(entries, &ring_, 0); error != 0) {
      refuse(std::string(std::strerror(-error)) +
             (error == -EPERM ? " (sysctl kernel.io_uring_disabled, or a container's filter of system calls)"
                              : ""));
    }
    if ((ring_.features & IORING_FEAT_RW_CUR_POS) == 0) {  // came with the plain read and write
      ::io_uring_queue_exit(&ring_);
      refuse("this kernel is older than 5.6");
    }
  }

  ~KernelUring() override { ::io_uring_queue_exit(&ring_); }

  int submit(const Transfer& transfer) noexcept override {
    io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);  // there are as many as blocks
    void* data = blocks_[transfer.block].iov_base;
    const auto bytes = static_cast<unsigned>(transfer.bytes);
    // Not by registered buffers: on huge pages they gain nothing, and they count against the memory that a
    // user may lock.
    transfer.writes ? ::io_uring_prep_write(entry, descriptor_, data, bytes, transfer.offset)
                    : ::io_uring_prep_read(entry, descriptor_, data, bytes, transfer.offset);
    ::io_uring_sqe_set_data64(entry, transfer.block);
    for (;;) {
      const int begun = ::io_uring_submit(&ring_);
      if (begun == 1) return 0;
      if (begun != -EINTR) return begun < 0 ? -begun : EAGAIN;
    }
  }

  Completion wait() noexcept override {
    io_uring_cqe* entry = nullptr;
    // The kernel completes what is under way whether or not it can be waited for, and until it has, the block
    // is not ours: so there is no giving up.
    for (int error = ::io_uring_wait_cqe(&ring_, &entry); error != 0;
         error = ::io_uring_wait_cqe(&ring_, &entry)) {
      if (error != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const Completion completion{static_cast<std::size_t>(entry->user_data), entry->res};
    ::io_uring_cqe_seen(&ring_, entry);
    return completion;
  }

 private:
  int descriptor_;
  std::vector<iovec> blocks_;
  io_uring ring_{};
};

}  // namespace

std::unique_ptr<Uring> open_uring(int descriptor, const std::vector<iovec>& blocks) {
  return std::make_unique<KernelUring>(descriptor, blocks);
}

}  // namespace reef
