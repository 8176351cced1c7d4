#include "distributed/process.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <sstream>

namespace reef {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  std::array<char, 256> target{};
  const auto length = ::readlink(path, target.data(), target.size());
  return length > 0 ? std::string(target.data(), static_cast<std::size_t>(length)) : std::string();
}

struct Stat {
  char state = '?';
  std::uint64_t start_ticks = 0;
};

/// State and start time out of /proc/<pid>/stat; nullopt if there is no such process.
std::optional<Stat> stat_of(const std::string& pid) {
  const auto line = first_line("/proc/" + pid + "/stat");
  // The name, the second field, is in parentheses and may hold blanks and parentheses.
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream rest(line.substr(name_end + 1));
  Stat stat;
  rest >> stat.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) rest >> skipped;
  if (!(rest >> stat.start_ticks)) return std::nullopt;
  return stat;
}

std::vector<std::string> interface_addresses() {
  std::vector<std::string> result;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return result;
  for (const auto* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_LOOPBACK) != 0) continue;
    std::array<char, INET6_ADDRSTRLEN> text{};
    const int family = each->ifa_addr->sa_family;
    const void* address = nullptr;
    if (family == AF_INET) address = &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    if (family == AF_INET6) address = &reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
    if (address != nullptr && ::inet_ntop(family, address, text.data(), text.size()) != nullptr) {
      result.emplace_back(text.data());
    }
  }
  ::freeifaddrs(list);
  return result;
}

}  // namespace

Process Process::self() {
  Process process;
  std::array<char, HOST_NAME_MAX + 1> host{};
  process.host = ::gethostname(host.data(), host.size() - 1) == 0 ? host.data() : "unknown";
  process.machine = process.host + ' ' + first_line("/proc/sys/kernel/random/boot_id") + ' ' +
                    link_target("/proc/self/ns/pid") + ' ' + link_target("/proc/self/ns/net");
  process.pid = ::getpid();
  if (const auto stat = stat_of("self")) process.start_ticks = stat->start_ticks;
  process.addresses = interface_addresses();
  return process;
}

std::string to_record(const Process& process) {
  std::ostringstream out;
  out << process.host << '\n' << process.machine << '\n' << process.pid << '\n' << process.start_ticks;
  for (const auto& address : process.addresses) out << '\n' << address;
  return out.str();
}

Process Process::from_record(const std::string& record) {
  std::istringstream in(record);
  Process process;
  std::getline(in, process.host);
  std::getline(in, process.machine);
  in >> process.pid >> process.start_ticks;
  for (std::string address; in >> address;) process.addresses.push_back(address);
  return process;
}

std::string Process::text() const { return "process " + std::to_string(pid) + " on host " + host; }

bool is_same(const Process& left, const Process& right) {
  return left.machine == right.machine && left.pid == right.pid && left.start_ticks == right.start_ticks;
}

bool has_ended(const Process& other, const Process& self) {
  const bool told = self.start_ticks != 0 && other.start_ticks != 0;  // there is a /proc
  if (!told || other.machine != self.machine) return false;
  const auto stat = stat_of(std::to_string(other.pid));
  return !stat || stat->start_ticks != other.start_ticks || stat->state == 'Z' || stat->state == 'X';
}

std::int64_t descriptors_left() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return std::numeric_limits<std::int64_t>::max();
  DIR* const folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return errno == EMFILE ? 0 : std::numeric_limits<std::int64_t>::max();
  std::int64_t open = -3;  // itself, . and ..
  while (::readdir(folder) != nullptr) ++open;
  ::closedir(folder);
  const auto most = static_cast<std::int64_t>(
      std::min<rlim_t>(limit.rlim_cur, static_cast<rlim_t>(std::numeric_limits<std::int64_t>::max())));
  return std::max<std::int64_t>(most - open, 0);
}

}  // namespace reef
