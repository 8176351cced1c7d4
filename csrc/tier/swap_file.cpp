#include "tier/swap_file.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "reef/error.h"

namespace reef {
namespace {

// An unnamed file where the file system has such a thing, else one that loses its name at once. -1: see
// errno.
int open_unnamed(const std::string& directory) {
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return descriptor;
  std::string path = directory + "/reef-swap-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

}  // namespace

SwapFile::SwapFile(const std::string& directory, bool direct) : directory_(directory) {
  descriptor_ = open_unnamed(directory);
  if (descriptor_ < 0) {
    const int error_number = errno;
    throw FileError("cannot make a swap file in '" + directory + "': " + std::strerror(error_number) +
                        "; give a directory that exists and can be written to",
                    directory, error_number);
  }
  // Set afterwards: a file system without O_DIRECT refuses the flag but keeps the file.
  direct_ = direct && ::fcntl(descriptor_, F_SETFL, O_DIRECT) == 0;
}

SwapFile::~SwapFile() { ::close(descriptor_); }

ssize_t SwapFile::sys_pwrite(const void* data, std::size_t bytes, off_t offset) {
  return ::pwrite(descriptor_, data, bytes, offset);
}
ssize_t SwapFile::sys_pread(void* data, std::size_t bytes, off_t offset) {
  return ::pread(descriptor_, data, bytes, offset);
}
int SwapFile::sys_fallocate(off_t offset, off_t bytes) {
  return ::fallocate(descriptor_, 0, offset, bytes) == 0 ? 0 : errno;
}
std::unique_ptr<Uring> SwapFile::sys_uring(const std::vector<iovec>& blocks) {
  return open_uring(descriptor_, blocks);
}

void SwapFile::fail(const char* call, int error_number, std::uint64_t bytes) const {
  struct statvfs status {};
  std::string free = "an unknown number of";
  if (::fstatvfs(descriptor_, &status) == 0) {
    free = std::to_string(static_cast<std::uint64_t>(status.f_bavail) * status.f_frsize);
  }
  throw FileError("swap file in '" + directory_ + "': " + call + " of " + std::to_string(bytes) +
                      " bytes failed: " + std::strerror(error_number) + " (" + free +
                      " bytes are free there); make room, or give another directory or a larger host tier",
                  directory_, error_number);
}

void SwapFile::write(const void* data, std::uint64_t bytes, std::uint64_t offset) {
  for (std::uint64_t done = 0; done < bytes;) {
    const ssize_t count =
        sys_pwrite(static_cast<const char*>(data) + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail("write", count < 0 ? errno : ENOSPC, bytes);
    done += static_cast<std::uint64_t>(count);
  }
}

void SwapFile::read(void* data, std::uint64_t bytes, std::uint64_t offset) {
  for (std::uint64_t done = 0; done < bytes;) {
    const ssize_t count =
        sys_pread(static_cast<char*>(data) + done, bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail("read", count < 0 ? errno : EIO, bytes);
    done += static_cast<std::uint64_t>(count);
  }
}

void SwapFile::reserve(std::uint64_t bytes) {
  if (bytes <= reserved_bytes_) return;
  const std::uint64_t wanted = bytes - reserved_bytes_;
  const int error_number = sys_fallocate(static_cast<off_t>(reserved_bytes_), static_cast<off_t>(wanted));
  if (error_number != 0 && error_number != EOPNOTSUPP && error_number != ENOSYS) {
    fail("reservation", error_number, wanted);
  }
  reserved_bytes_ = bytes;
}

}  // namespace reef
