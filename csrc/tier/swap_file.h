#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tier/uring.h"

namespace reef {

/// A file without a name. One virtual function per system call, so that a test can let any of them fail.
class SwapFile {
 public:
  /// Alignment of offsets, lengths and memory: what O_DIRECT asks of any disk in use.
  static constexpr std::uint64_t kAlignment = 4096;

  /// Throws FileError if `directory` cannot hold one.
  SwapFile(const std::string& directory, bool direct);
  virtual ~SwapFile();
  SwapFile(const SwapFile&) = delete;
  SwapFile& operator=(const SwapFile&) = delete;

  /// Whole transfers. Throw FileError: system call, path, errno, bytes wanted, bytes free on the file system.
  void write(const void* data, std::uint64_t bytes, std::uint64_t offset);
  void read(void* data, std::uint64_t bytes, std::uint64_t offset);
  /// Makes sure that the file system has room for [0, bytes).
  void reserve(std::uint64_t bytes);
  /// Throws ConfigError where there is no io_uring. Neither the file nor the blocks may go before it.
  std::unique_ptr<Uring> uring(const std::vector<iovec>& blocks) { return sys_uring(blocks); }
  /// Throws the FileError of a transfer that failed.
  [[noreturn]] void fail(const char* call, int error_number, std::uint64_t bytes) const;

  const std::string& directory() const { return directory_; }
  bool direct() const { return direct_; }

 protected:
  virtual ssize_t sys_pwrite(const void* data, std::size_t bytes, off_t offset);
  virtual ssize_t sys_pread(void* data, std::size_t bytes, off_t offset);
  virtual int sys_fallocate(off_t offset, off_t bytes);
  virtual std::unique_ptr<Uring> sys_uring(const std::vector<iovec>& blocks);

 private:
  std::string directory_;
  int descriptor_ = -1;
  bool direct_ = false;
  std::uint64_t reserved_bytes_ = 0;
};

}  // namespace reef
