#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "fork.h"
#include "free_ranges.h"
#include "round_up.h"
#include "userfault/frames.h"
#include "userfault/userfault.h"

namespace reef {

/// A range of addresses, and the frames of memory of one size that circulate in it. Addresses are in use,
/// with frames or without, or free: kept with frames, or empty. The whole range is watched, so whoever
/// touches an address without a frame waits. Frames are kept until trim() frees them, because making a frame
/// costs ten times as much as copying one, and moving one costs half as much (a large one, a sixteenth).
/// Thread-safe. No function waits with the lock held.
///
/// Sizes of frames do not mix in a range: where addresses have had small frames the kernel has tables for
/// those, and splits a large frame that is moved there.
class FramePool final : private AtFork {
 public:
  /// Frames side by side, with any content.
  struct Frames {
    void* data = nullptr;
    std::uint64_t bytes = 0;
  };

  /// Reserves `bytes` of addresses. `frame_bytes` is kFrameBytes or kLargeFrameBytes, of which all ranges are
  /// multiples. `faults` must outlive it. Throws std::system_error.
  FramePool(UserFault& faults, std::uint64_t bytes, std::uint64_t frame_bytes = kFrameBytes);
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  /// Takes kept frames as far as they reach, and makes the rest. Throws std::bad_alloc if the system has no
  /// memory, or the pool no addresses.
  Frames take(std::uint64_t bytes);
  /// Takes frames back, together with their addresses.
  void keep(Frames frames) noexcept;
  /// Takes addresses without frames. Throws std::bad_alloc if there are none.
  void* take_addresses(std::uint64_t bytes);
  void give_up_addresses(const void* data, std::uint64_t bytes) noexcept;
  /// The bytes of the frames that hold so many.
  std::uint64_t whole(std::uint64_t bytes) const { return round_up(bytes, frame_bytes_); }
  bool has_address(const void* data) const { return data >= begin_ && data < begin_ + bytes_; }
  /// Gives frames back to the system until at most so many bytes are kept.
  void trim(std::uint64_t kept_bytes) noexcept;
  std::uint64_t kept_bytes() const;

  /// Moves the frames of `data`, all of which are present, to other addresses, so that nobody reaches the
  /// bytes. Returns nothing, and leaves all frames in place, if the kernel holds one of them for a device.
  std::optional<Frames> move_out(void* data, std::uint64_t bytes);
  /// Moves frames to `data`, which is watched and has none, and wakes whoever waits there. Returns false, and
  /// leaves the frames where they are, if the system has no memory to map them with.
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

  /// Reserved addresses that begin at a multiple of `frame_bytes`.
  class Addresses {
   public:
    Addresses(std::uint64_t bytes, std::uint64_t frame_bytes);
    ~Addresses();
    Addresses(const Addresses&) = delete;
    Addresses& operator=(const Addresses&) = delete;
    char* begin() const { return begin_; }

   private:
    void* mapping_;
    std::uint64_t mapping_bytes_;
    char* begin_;
  };

  UserFault& faults_;
  const std::uint64_t frame_bytes_;
  const std::uint64_t bytes_;
  const Addresses addresses_;
  const Addresses nursery_;  ///< where frames are made: an access there is no fault
  char* const begin_;        ///< of the addresses
  mutable std::mutex mutex_;
  FreeRanges empty_;  ///< free addresses without frames
  FreeRanges kept_;   ///< and with
  std::mutex nursery_mutex_;
};

}  // namespace reef
