#include "tier/forked_readers.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace reef {
namespace {

void close_end(int end) {
  if (end >= 0) ::close(end);
}

bool has_gone(int pipe) {
  pollfd end{pipe, POLLIN, 0};
  return pipe >= 0 && ::poll(&end, 1, 0) == 1 && (end.revents & POLLHUP) != 0;
}

}  // namespace

ForkedReaders::~ForkedReaders() {
  for (const Reader& reader : alive_) close_end(reader.pipe);
}

bool ForkedReaders::may_read(std::uint64_t forks) {
  std::erase_if(alive_, [](const Reader& reader) {
    if (!has_gone(reader.pipe)) return false;
    ::close(reader.pipe);
    return true;
  });
  return std::any_of(alive_.begin(), alive_.end(),
                     [&](const Reader& reader) { return reader.fork >= forks; });
}

void ForkedReaders::before_fork() noexcept {
  if (::pipe2(ends_, O_CLOEXEC) != 0) ends_[0] = ends_[1] = -1;
}

void ForkedReaders::after_fork_in_parent() noexcept {
  close_end(std::exchange(ends_[1], -1));
  alive_.push_back({forks_++, std::exchange(ends_[0], -1)});
}

// The end that stays open is the one that tells the parent.
void ForkedReaders::after_fork_in_child() noexcept {
  close_end(std::exchange(ends_[0], -1));
  for (const Reader& reader : std::exchange(alive_, {})) close_end(reader.pipe);
}

}  // namespace reef
