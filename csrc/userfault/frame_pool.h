#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "free_ranges.h"
#include "userfault/userfault.h"

namespace reef {

/// Frames of memory that circulate: out of addresses, through here, and to other addresses. A frame that has
/// been made is not freed and made anew, which costs ten times a copy, but kept until trim() wants it. Moving
/// takes half a copy. Thread-safe; nothing waits under its lock.
class FramePool {
 public:
  /// So many frames side by side in the pool, their content anything.
  struct Frames {
    void* data = nullptr;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint64_t kFrameBytes = 4096;

  /// Reserves addresses for `bytes` of frames. `faults` must outlive it. Throws std::system_error.
  FramePool(UserFault& faults, std::uint64_t bytes);
  ~FramePool();
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  /// Of those that are kept, as far as they reach, else new. Throws std::bad_alloc if the system has none, or
  /// if more are in the pool than it has addresses for.
  Frames take(std::uint64_t bytes);
  /// Takes them back.
  void keep(Frames frames) noexcept;
  /// Gives frames back to the system until at most so many bytes are kept.
  void trim(std::uint64_t kept_bytes) noexcept;
  std::uint64_t kept_bytes() const;

  /// Takes the frames of `data`, all of them present, into the pool: from then on nobody reaches the bytes.
  /// Nothing if the kernel holds some of them for a device; then all stay.
  std::optional<Frames> move_out(void* data, std::uint64_t bytes);
  /// The frames are those of `data`, which is absent and watched; who waits for them goes on.
  void move_in(Frames frames, void* data);
  /// Gives `data`, which is absent and watched, frames of any content.
  void fill(void* data, std::uint64_t bytes);

  /// Keeps no frames, which the parent and the child would otherwise share, and locks.
  void before_fork();
  void after_fork_in_parent();
  /// After `faults` has been opened anew.
  void after_fork_in_child();

 private:
  char* take_addresses(std::uint64_t bytes);
  void give_up_addresses(const void* data, std::uint64_t bytes) noexcept;
  void gather(char* to, std::uint64_t bytes);
  void make(char* to, std::uint64_t bytes);
  std::uint64_t move(void* to, void* from, std::uint64_t bytes);

  UserFault& faults_;
  std::uint64_t bytes_;
  char* pool_ = nullptr;     ///< watched, since frames are moved to it
  char* nursery_ = nullptr;  ///< where frames are made: an access there is no fault
  mutable std::mutex mutex_;
  FreeRanges empty_;  ///< addresses without frames
  FreeRanges kept_;   ///< with
  std::mutex nursery_mutex_;
};

}  // namespace reef
