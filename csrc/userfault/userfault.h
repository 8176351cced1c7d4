#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace reef {

/// How much of userfaultfd(2) a process may use, with UFFDIO_MOVE (Linux 6.8).
enum class FaultAccess : std::uint8_t {
  kNone,
  kUser,  ///< a system call that is given absent memory fails with EFAULT
  kFull,  ///< whoever touches absent memory waits until it is there
};

struct FaultSupport {
  FaultAccess access = FaultAccess::kNone;
  std::string reason;  ///< why not more, with the way out; empty for kFull
};
/// What this process may use, by trying. Cost: some system calls.
FaultSupport fault_support();
/// What comes of it for addresses: "stay", or that they do not, or not for system calls, and why.
std::string to_text(const FaultSupport& support);

/// A descriptor of userfaultfd(2): memory that it watches may be absent, and whoever touches it then waits.
/// All functions may be called by any thread; those that the kernel refuses for reasons not named throw
/// std::system_error. Addresses and bytes are multiples of kFrameBytes.
class UserFault {
 public:
  /// Throws std::system_error if the process may not use it so.
  explicit UserFault(FaultAccess access);
  ~UserFault();
  UserFault(const UserFault&) = delete;
  UserFault& operator=(const UserFault&) = delete;

  FaultAccess access() const { return access_; }

  /// Makes an access to an absent part of [data, data + bytes), private anonymous memory, a fault for next();
  /// and ends that.
  void watch(void* data, std::uint64_t bytes);
  void unwatch(void* data, std::uint64_t bytes);

  /// Moves the frames of `from`, all of them present, to `to`, which is watched and absent, and wakes who
  /// waits there. Gives the bytes moved: fewer where the kernel holds a frame, because a device copies from
  /// or to it or because a forked process shares it.
  std::uint64_t move(void* to, void* from, std::uint64_t bytes);
  /// Lets whoever waits there try again.
  void wake(void* data, std::uint64_t bytes) noexcept;

  /// Waits for a fault and returns its address, or nothing once close() was called.
  std::optional<std::uint64_t> next();
  /// Opens a new descriptor in a forked child, whose memory nobody watches.
  void open_anew();
  /// Makes next() return nothing from now on, on all threads.
  void close() noexcept;

 private:
  void open();

  FaultAccess access_;
  int descriptor_ = -1;
  int closing_ = -1;  ///< an eventfd
};

}  // namespace reef
