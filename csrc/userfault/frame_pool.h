#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "fork.h"
#include "free_ranges.h"
#include "userfault/userfault.h"

namespace reef {

/// Addresses, and frames of memory that circulate among them. A range of addresses is somebody's, with frames
/// or without, or free, with frames (they are kept) or without (it is empty). All of it is watched: who
/// touches an address without a frame waits. A frame that has been made is not freed and made anew, which
/// costs ten times a copy, but kept until trim() wants it; moving takes half a copy. Thread-safe; nothing
/// waits under its lock.
class FramePool final : private AtFork {
 public:
  /// So many frames side by side, their content anything.
  struct Frames {
    void* data = nullptr;
    std::uint64_t bytes = 0;
  };
  static constexpr std::uint64_t kFrameBytes = 4096;

  /// Reserves `bytes` of addresses. `faults` must outlive it. Throws std::system_error.
  FramePool(UserFault& faults, std::uint64_t bytes);
  ~FramePool();
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  /// Of the frames that are kept, as far as they reach, else new. Throws std::bad_alloc if the system has
  /// none, or if there are no addresses.
  Frames take(std::uint64_t bytes);
  /// Takes them back, and their addresses.
  void keep(Frames frames) noexcept;
  /// Addresses without frames. Throws std::bad_alloc.
  void* take_addresses(std::uint64_t bytes);
  void give_up_addresses(const void* data, std::uint64_t bytes) noexcept;
  bool has_address(const void* data) const { return data >= begin_ && data < begin_ + bytes_; }
  /// Gives frames back to the system until at most so many bytes are kept.
  void trim(std::uint64_t kept_bytes) noexcept;
  std::uint64_t kept_bytes() const;

  /// Takes the frames of `data`, all of them present, to other addresses: from then on nobody reaches the
  /// bytes. Nothing if the kernel holds some of them for a device; then all stay.
  std::optional<Frames> move_out(void* data, std::uint64_t bytes);
  /// The frames are those of `data`, which is watched and has none; who waits for them goes on. False: the
  /// system has no memory for it, and they stay where they are.
  bool move_in(Frames frames, void* data) noexcept;

  /// In a forked child, after `faults` has been opened anew.
  void watch_again() { faults_.watch(begin_, bytes_); }

 private:
  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override { after_fork_in_parent(); }
  void gather(char* to, std::uint64_t bytes);
  void make(char* to, std::uint64_t bytes);
  void replace(char* to, char* from, std::uint64_t bytes);
  std::uint64_t move(void* to, void* from, std::uint64_t bytes);

  UserFault& faults_;
  std::uint64_t bytes_;
  char* begin_ = nullptr;    ///< of the addresses
  char* nursery_ = nullptr;  ///< where frames are made: an access there is no fault
  mutable std::mutex mutex_;
  FreeRanges empty_;  ///< free addresses without frames
  FreeRanges kept_;   ///< and with
  std::mutex nursery_mutex_;
};

}  // namespace reef
