#include "userfault/userfault.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "round_up.h"
#include "userfault/frames.h"
#include "userfault/userfault_abi.h"

namespace reef {
namespace {

constexpr const char* kDevice = "/dev/userfaultfd";

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// A descriptor, or -1 with errno. The device asks for no privilege but the right to read it, and passes
// filters of system calls that do not know userfaultfd(2).
int open_descriptor(FaultAccess access) {
  constexpr int kFlags = O_CLOEXEC | O_NONBLOCK;
  const int only = access == FaultAccess::kUser ? abi::kUserModeOnly : 0;
  const auto made = static_cast<int>(::syscall(SYS_userfaultfd, kFlags | only));
  if (made >= 0) return made;
  const int refused = errno;
  const int device = ::open(kDevice, O_RDWR | O_CLOEXEC);
  if (device < 0) {
    errno = refused;
    return -1;
  }
  const int descriptor = ::ioctl(device, abi::kNewDescriptor, kFlags | only);
  const int error = errno;
  ::close(device);
  errno = error;
  return descriptor;
}

// False with errno: the kernel has no UFFDIO_MOVE.
bool agree(int descriptor) {
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = abi::kFeatureMove;
  return ::ioctl(descriptor, UFFDIO_API, &api) == 0;
}

// 0, or what the kernel says, and whether it is the kernel that is too old.
std::pair<int, bool> try_access(FaultAccess access) {
  const int descriptor = open_descriptor(access);
  if (descriptor < 0) return {errno, errno == ENOSYS};
  const bool agreed = agree(descriptor);
  const int error = agreed ? 0 : errno;
  ::close(descriptor);
  return {error, !agreed};
}

}  // namespace

FaultSupport fault_support() {
  const auto [full, too_old] = try_access(FaultAccess::kFull);
  if (full == 0) return {FaultAccess::kFull, ""};
  if (too_old) return {FaultAccess::kNone, "the kernel has no UFFDIO_MOVE (Linux 6.8 or later has)"};
  const std::string refused =
      std::string("userfaultfd for system calls is refused (") + std::strerror(full) + "), and " + kDevice +
      (::access(kDevice, F_OK) != 0 ? " is not there" : " may not be opened") +
      "; give the process CAP_SYS_PTRACE, or the device (docker run --device " + kDevice + ")";
  const int user = try_access(FaultAccess::kUser).first;
  if (user == 0) return {FaultAccess::kUser, refused};
  return {FaultAccess::kNone, refused};
}

std::string to_text(const FaultSupport& support) {
  switch (support.access) {
    case FaultAccess::kFull:
      return "stay";
    case FaultAccess::kUser:
      return "stay, but not for system calls: " + support.reason;
    default:
      return support.reason.empty() ? "go" : "go: " + support.reason;
  }
}

UserFault::UserFault(FaultAccess access) : access_(access) { open(); }

UserFault::~UserFault() {
  ::close(descriptor_);
  ::close(closing_);
}

void UserFault::open() {
  descriptor_ = open_descriptor(access_);
  if (descriptor_ < 0) fail("userfaultfd");
  closing_ = ::eventfd(0, EFD_CLOEXEC);
  if (agree(descriptor_) && closing_ >= 0) return;
  const int error = errno;
  ::close(descriptor_);
  if (closing_ >= 0) ::close(closing_);
  errno = error;
  fail("UFFDIO_API");
}

void UserFault::open_anew() {
  ::close(descriptor_);
  ::close(closing_);
  open();
}

void UserFault::watch(void* data, std::uint64_t bytes) {
  uffdio_register request{};
  request.range = {reinterpret_cast<std::uint64_t>(data), bytes};
  request.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (::ioctl(descriptor_, UFFDIO_REGISTER, &request) != 0) fail("UFFDIO_REGISTER");
}

void UserFault::unwatch(void* data, std::uint64_t bytes) {
  uffdio_range range{reinterpret_cast<std::uint64_t>(data), bytes};
  if (::ioctl(descriptor_, UFFDIO_UNREGISTER, &range) != 0) fail("UFFDIO_UNREGISTER");
}

// A call moves within one mapping to another. Memory of another allocator's may span mappings, which only
// differ in their past; then smaller parts are tried.
std::uint64_t UserFault::move(void* to, void* from, std::uint64_t bytes) {
  std::uint64_t part = bytes;
  for (std::uint64_t done = 0; done < bytes;) {
    part = std::min(part, bytes - done);
    abi::Move request{reinterpret_cast<std::uint64_t>(to) + done,
                      reinterpret_cast<std::uint64_t>(from) + done, part, 0, 0};
    const int error = ::ioctl(descriptor_, abi::kMove, &request) == 0 ? 0 : errno;
    if (request.moved > 0) done += static_cast<std::uint64_t>(request.moved);
    if (error == 0) part = bytes;
    if (error == EINVAL && part > kFrameBytes) {
      part = round_up(part / 2, kFrameBytes);
      continue;
    }
    if (error == EBUSY || error == EINVAL) return done;
    if (error != 0 && error != EAGAIN) {
      errno = error;
      fail("UFFDIO_MOVE");
    }
  }
  return bytes;
}

void UserFault::wake(void* data, std::uint64_t bytes) noexcept {
  uffdio_range range{reinterpret_cast<std::uint64_t>(data), bytes};
  ::ioctl(descriptor_, UFFDIO_WAKE, &range);
}

std::optional<std::uint64_t> UserFault::next() {
  for (;;) {
    pollfd events[] = {{descriptor_, POLLIN, 0}, {closing_, POLLIN, 0}};
    if (::poll(events, 2, -1) < 0 && errno != EINTR) fail("poll");
    if (events[1].revents != 0) return std::nullopt;
    uffd_msg message;
    if (::read(descriptor_, &message, sizeof message) != sizeof message) continue;  // another thread has it
    const std::uint64_t address = message.arg.pagefault.address;                    // packed
    if (message.event == UFFD_EVENT_PAGEFAULT) return address;
  }
}

void UserFault::close() noexcept {
  const std::uint64_t one = 1;
  (void)!::write(closing_, &one, sizeof one);
}

}  // namespace reef
