#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace reef {

/// Which process this is, among all processes of all hosts, so that another one can say later whether it
/// still runs.
struct Process {
  std::string host;               ///< host name, for people
  std::string machine;            ///< boot, process and network namespace: where numbers below have a meaning
  std::int64_t pid = 0;           ///< of `machine`
  std::uint64_t start_ticks = 0;  ///< since boot; tells apart processes that had the same pid
  std::vector<std::string> addresses;  ///< of the host's network interfaces, loopback left out

  static Process self();
  /// Returns the process of which to_record() made `record`.
  static Process from_record(const std::string& record);

  /// Host and pid as they stand in messages: "process 123 on host alpha".
  std::string text() const;
};

/// Returns a text from which another process can read this one's description.
std::string to_record(const Process& process);

/// True if both are one process, which may have begun another program since.
bool is_same(const Process& left, const Process& right);

/// True if `other` ran on the machine of `self` and has ended. A process that was killed and not yet reaped
/// by its parent has ended. False where it cannot be told.
bool has_ended(const Process& other, const Process& self);

/// How many more files and sockets this process may open.
std::int64_t descriptors_left();

}  // namespace reef
