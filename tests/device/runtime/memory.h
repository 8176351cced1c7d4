// The memory of played devices. Each has one range of addresses, mapped twice: without access, where the
// program knows it, and with access, where the work of streams reaches it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace reef::played {

struct Block {
  std::size_t bytes = 0;
  int device = -1;  ///< -1: page-locked host memory
};

/// Grants a number of allocations, then refuses some, then grants all.
class Refusals {
 public:
  void set(int succeed, int fail) {
    const std::lock_guard lock(mutex_);
    succeed_ = succeed;
    fail_ = fail;
  }
  bool refuses() {
    const std::lock_guard lock(mutex_);
    if (fail_ <= 0) return false;
    if (succeed_ > 0) return --succeed_, false;
    return --fail_, true;
  }

 private:
  std::mutex mutex_;
  int succeed_ = 0;
  int fail_ = 0;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(int device);

  /// Returns null if the device has not so much.
  void* allocate(std::size_t bytes);
  /// Returns whether there was such a block. Whatever still uses it is ended by a segmentation fault.
  bool free(void* data);
  std::optional<Block> find(const void* data) const;
  /// Returns null for an address of something else.
  void* reach(const void* data) const;
  void set_total_bytes(std::size_t bytes);
  std::size_t total_bytes() const;
  std::size_t free_bytes() const;
  /// Gives access at the program's addresses, or takes it again.
  void open(bool opened);

  Refusals refusals;

 private:
  std::size_t offset_of(const void* data) const {
    return static_cast<std::size_t>(static_cast<const char*>(data) - given_);
  }

  int device_;
  int file_;
  char* given_;    // what the program is given
  char* reached_;  // the same memory
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> blocks_;  // bytes by offset
  std::size_t used_bytes_ = 0;
  std::size_t total_bytes_;
  std::size_t end_ = 0;  // of what was ever allocated
};

class HostMemory {
 public:
  void* allocate(std::size_t bytes);
  bool free(void* data);
  std::optional<Block> find(const void* data) const;
  std::size_t bytes() const;

  Refusals refusals;

 private:
  mutable std::mutex mutex_;
  std::map<const char*, std::size_t> blocks_;
  std::size_t bytes_ = 0;
};

DeviceMemory& device_memory(int device);
HostMemory& host_memory();
/// Of a device or page-locked; nothing for memory that CUDA does not know.
std::optional<Block> find_block(const void* data);

}  // namespace reef::played
