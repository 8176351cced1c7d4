#include "available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace reef {
namespace {

constexpr std::uint64_t kNoLimit = std::numeric_limits<std::uint64_t>::max();

std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // "max" is none
}

std::uint64_t available_in_system() {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with("MemAvailable:")) return std::stoull(line.substr(13)) << 10;
  return 0;
}

// Reads control groups of version 2: the process's group and each group around it may have a limit.
std::uint64_t available_in_groups() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("0::")) {
  }
  if (!line.starts_with("0::")) return kNoLimit;
  std::uint64_t least = kNoLimit;
  std::string group = line.substr(3);
  for (;;) {
    const std::string folder = "/sys/fs/cgroup" + group;
    const auto most = number_in(folder + "/memory.max");
    const auto used = number_in(folder + "/memory.current");
    if (most && used) least = std::min(least, *most - std::min(*most, *used));
    if (group.empty()) return least;
    group.erase(group.rfind('/'));
  }
}

}  // namespace

std::uint64_t available_memory_bytes() { return std::min(available_in_system(), available_in_groups()); }

}  // namespace reef
