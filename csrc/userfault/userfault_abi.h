#pragma once

#include <linux/userfaultfd.h>
#include <sys/ioctl.h>

#include <cstdint>

/// What of the kernel's interface older headers lack: Linux 6.8, include/uapi/linux/userfaultfd.h.
namespace reef::abi {

inline constexpr int kUserModeOnly = 1;                        // UFFD_USER_MODE_ONLY, 5.11
inline constexpr unsigned long kNewDescriptor = _IO(0xAA, 0);  // USERFAULTFD_IOC_NEW, 6.1
inline constexpr std::uint64_t kFeatureMove = 1U << 16;        // 6.8

struct Move {
  std::uint64_t to;
  std::uint64_t from;
  std::uint64_t bytes;
  std::uint64_t mode;
  std::int64_t moved;
};
inline constexpr unsigned long kMove = _IOWR(0xAA, 0x05, Move);

}  // namespace reef::abi
