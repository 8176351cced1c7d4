// The memory of played devices. The memory of each device is mapped twice: the program gets addresses at
// which it is not accessible, and the work of streams uses other addresses, at which it is.
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

/// Decides which allocations fail on demand: none at first; after set(), `succeed` allocations are granted,
/// the next `fail` are refused, and all later ones are granted.
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
  static constexpr std::size_t kTotalBytes = std::size_t{4} << 30;

  explicit DeviceMemory(int device);

  /// Returns null if the device does not have enough free memory.
  void* allocate(std::size_t bytes);
  /// Frees a block and returns whether there was one at this address. Any later use is a segmentation fault.
  bool free(void* data);
  std::optional<Block> find(const void* data) const;
  /// Returns the address at which streams access this memory, or null if `data` is not in it.
  void* reach(const void* data) const;
  std::size_t free_bytes() const;
  /// Makes the memory accessible at the program's addresses, or inaccessible again: for the calling thread
  /// alone where the processor has protection keys, else for all threads, which takes time for each page.
  void open(bool opened);

  Refusals refusals;

 private:
  std::size_t offset_of(const void* data) const {
    return static_cast<std::size_t>(static_cast<const char*>(data) - given_);
  }

  int device_;
  int file_;
  int key_;        // The protection key of the program's addresses; -1: none.
  char* given_;    // The addresses that the program gets.
  char* reached_;  // The addresses that streams use.
  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> blocks_;  // Maps offsets to sizes in bytes.
  std::size_t used_bytes_ = 0;
  std::size_t end_ = 0;  // The end of all memory that was ever allocated.
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
/// Returns the block of device memory or page-locked memory that contains `data`, or nothing for other
/// memory.
std::optional<Block> find_block(const void* data);

}  // namespace reef::played
