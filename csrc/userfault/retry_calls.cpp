// A library of its own, for LD_PRELOAD: where a system call that is given absent memory fails with EFAULT
// (FaultAccess::kUser), and has done nothing, the memory is touched here, which brings it back, and the call
// is made once more. It sees what the program and its libraries call, not what the C library calls by itself
// (fwrite of a large buffer).
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

#include "userfault/frames.h"

namespace {

// What was brought back may have left again when the call is made.
constexpr int kMostTimes = 100;

void touch(const void* data, std::size_t bytes) {
  const auto* const at = static_cast<const volatile char*>(data);
  for (std::size_t offset = 0; offset < bytes; offset += reef::kFrameBytes) (void)at[offset];
  if (bytes > 0) (void)at[bytes - 1];
}

void touch(const iovec* parts, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) touch(parts[i].iov_base, parts[i].iov_len);
}

template <class Call, class Touch>
ssize_t again(const Call& call, const Touch& touch_all) {
  for (int times = 0;; ++times) {
    const ssize_t done = call();
    if (done >= 0 || errno != EFAULT || times == kMostTimes) return done;
    touch_all();
  }
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// NOLINTBEGIN(cppcoreguidelines-macro-usage): a name is a symbol here, and a string.
#define REEF_RETRY(name, parameters, arguments, ...)                    \
  extern "C" [[gnu::visibility("default")]] ssize_t name parameters {   \
    static auto* const real = next<ssize_t parameters>(#name);          \
    return again([&] { return real arguments; }, [&] { __VA_ARGS__; }); \
  }
#define REEF_RETRY_BUFFER(name, parameters, arguments) \
  REEF_RETRY(name, parameters, arguments, touch(data, bytes))
#define REEF_RETRY_PARTS(name, parameters, arguments) \
  REEF_RETRY(name, parameters, arguments, touch(parts, static_cast<std::size_t>(count)))

REEF_RETRY_BUFFER(read, (int file, void* data, std::size_t bytes), (file, data, bytes))
REEF_RETRY_BUFFER(write, (int file, const void* data, std::size_t bytes), (file, data, bytes))
REEF_RETRY_BUFFER(pread, (int file, void* data, std::size_t bytes, off_t at), (file, data, bytes, at))
REEF_RETRY_BUFFER(pwrite, (int file, const void* data, std::size_t bytes, off_t at), (file, data, bytes, at))
REEF_RETRY_BUFFER(pread64, (int file, void* data, std::size_t bytes, off64_t at), (file, data, bytes, at))
REEF_RETRY_BUFFER(pwrite64, (int file, const void* data, std::size_t bytes, off64_t at),
                  (file, data, bytes, at))
REEF_RETRY_BUFFER(send, (int socket, const void* data, std::size_t bytes, int flags),
                  (socket, data, bytes, flags))
REEF_RETRY_BUFFER(recv, (int socket, void* data, std::size_t bytes, int flags), (socket, data, bytes, flags))
REEF_RETRY_BUFFER(sendto,
                  (int socket, const void* data, std::size_t bytes, int flags, const sockaddr* to,
                   socklen_t size),
                  (socket, data, bytes, flags, to, size))
REEF_RETRY_BUFFER(recvfrom,
                  (int socket, void* data, std::size_t bytes, int flags, sockaddr* from, socklen_t* size),
                  (socket, data, bytes, flags, from, size))
REEF_RETRY_PARTS(readv, (int file, const iovec* parts, int count), (file, parts, count))
REEF_RETRY_PARTS(writev, (int file, const iovec* parts, int count), (file, parts, count))
REEF_RETRY_PARTS(preadv, (int file, const iovec* parts, int count, off_t at), (file, parts, count, at))
REEF_RETRY_PARTS(pwritev, (int file, const iovec* parts, int count, off_t at), (file, parts, count, at))
REEF_RETRY_PARTS(preadv64, (int file, const iovec* parts, int count, off64_t at), (file, parts, count, at))
REEF_RETRY_PARTS(pwritev64, (int file, const iovec* parts, int count, off64_t at), (file, parts, count, at))
REEF_RETRY_PARTS(preadv2, (int file, const iovec* parts, int count, off_t at, int flags),
                 (file, parts, count, at, flags))
REEF_RETRY_PARTS(pwritev2, (int file, const iovec* parts, int count, off_t at, int flags),
                 (file, parts, count, at, flags))
REEF_RETRY_PARTS(preadv64v2, (int file, const iovec* parts, int count, off64_t at, int flags),
                 (file, parts, count, at, flags))
REEF_RETRY_PARTS(pwritev64v2, (int file, const iovec* parts, int count, off64_t at, int flags),
                 (file, parts, count, at, flags))
REEF_RETRY(sendmsg, (int socket, const msghdr* message, int flags), (socket, message, flags),
           touch(message->msg_iov, message->msg_iovlen))
REEF_RETRY(recvmsg, (int socket, msghdr* message, int flags), (socket, message, flags),
           touch(message->msg_iov, message->msg_iovlen))
// What a program calls that was compiled with _FORTIFY_SOURCE.
REEF_RETRY_BUFFER(__read_chk, (int file, void* data, std::size_t bytes, std::size_t room),
                  (file, data, bytes, room))
REEF_RETRY_BUFFER(__pread_chk, (int file, void* data, std::size_t bytes, off_t at, std::size_t room),
                  (file, data, bytes, at, room))
REEF_RETRY_BUFFER(__pread64_chk, (int file, void* data, std::size_t bytes, off64_t at, std::size_t room),
                  (file, data, bytes, at, room))
REEF_RETRY_BUFFER(__recv_chk, (int socket, void* data, std::size_t bytes, std::size_t room, int flags),
                  (socket, data, bytes, room, flags))
// NOLINTEND(cppcoreguidelines-macro-usage)
