#pragma once

#include <cstdint>
#include <string>

#include "reef/export.h"

namespace reef {

/// Whether a tensor that has left memory keeps its address. If it does, whoever reads or writes it through a
/// pointer, whenever that was taken, waits until it is back. That takes userfaultfd(2) with UFFDIO_MOVE
/// (Linux 6.8; docs/budget.md says what a process must be allowed), and is for the CPU's memory.
enum class Addresses : std::uint8_t {
  kAutomatic,  ///< they stay where the process may have it so. Environment: REEF_ADDRESSES=stay|go
  kStay,       ///< ConfigError where it may not
  kGo,         ///< a tensor that is away has none, and an access to it throws
};

/// What kAutomatic comes to in this process: "stay"; "stay, but not for system calls: " and why, where a
/// system call that is given memory that is away fails with EFAULT; "go: " and why.
REEF_API std::string addresses_here();

}  // namespace reef
