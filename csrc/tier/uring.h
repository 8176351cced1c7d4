#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace reef {

/// Transfers between blocks of memory and one file, begun and completed by io_uring. One thread at a time,
/// and one transfer at a time for each block. Virtual, so that a test can let any answer of the kernel be
/// another.
class Uring {
 public:
  struct Transfer {
    bool writes = false;
    std::size_t block = 0;    ///< which
    std::uint64_t bytes = 0;  ///< from the block's begin
    std::uint64_t offset = 0;
  };
  struct Completion {
    std::size_t block = 0;
    int result = 0;  ///< bytes, or -errno
  };

  Uring() = default;
  /// Only when nothing is under way.
  virtual ~Uring() = default;
  Uring(const Uring&) = delete;
  Uring& operator=(const Uring&) = delete;

  /// From now until wait() has returned it the block is the kernel's. 0, or the errno for which nothing was
  /// begun; then nothing more may be submitted.
  virtual int submit(const Transfer& transfer) noexcept = 0;
  /// Waits for any one that is under way.
  virtual Completion wait() noexcept = 0;
};

/// Throws ConfigError where the kernel or the build has no io_uring. The blocks must outlive it.
std::unique_ptr<Uring> open_uring(int descriptor, const std::vector<iovec>& blocks);

}  // namespace reef
