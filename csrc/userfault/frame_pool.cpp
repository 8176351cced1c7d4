#include "userfault/frame_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>

#include "round_up.h"

namespace reef {
namespace {

// Made at once, at most.
constexpr std::uint64_t kNurseryBytes = std::uint64_t{16} << 20;

char* reserve(std::uint64_t bytes) {
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  ::madvise(data, bytes, MADV_DONTDUMP);  // an advice
  return static_cast<char*>(data);
}

std::uint64_t address(const void* data) { return reinterpret_cast<std::uint64_t>(data); }
char* at(std::uint64_t start) { return reinterpret_cast<char*>(start); }

}  // namespace

FramePool::FramePool(UserFault& faults, std::uint64_t bytes)
    : AtFork(Order::kBlocks),
      faults_(faults),
      bytes_(round_up(bytes, kFrameBytes)),
      begin_(reserve(bytes_)),
      nursery_(reserve(kNurseryBytes)) {
  faults_.watch(begin_, bytes_);
  empty_.add(address(begin_), bytes_);
}

FramePool::~FramePool() {
  ::munmap(begin_, bytes_);
  ::munmap(nursery_, kNurseryBytes);
}

// ---- frames

FramePool::Frames FramePool::take(std::uint64_t bytes) {
  bytes = round_up(bytes, kFrameBytes);
  {
    const std::lock_guard lock(mutex_);
    if (const auto start = kept_.take(bytes)) return {at(*start), bytes};
  }
  void* const data = take_addresses(bytes);
  try {
    gather(static_cast<char*>(data), bytes);
  } catch (...) {
    ::madvise(data, bytes, MADV_DONTNEED);
    give_up_addresses(data, bytes);
    throw;
  }
  return {data, bytes};
}

void FramePool::keep(Frames frames) noexcept {
  if (frames.data == nullptr) return;
  const std::lock_guard lock(mutex_);
  kept_.add(address(frames.data), frames.bytes);
}

void* FramePool::take_addresses(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto start = empty_.take(round_up(bytes, kFrameBytes));
  if (!start) throw std::bad_alloc();
  return at(*start);
}

void FramePool::give_up_addresses(const void* data, std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  empty_.add(address(data), round_up(bytes, kFrameBytes));
}

void FramePool::trim(std::uint64_t kept_bytes) noexcept {
  for (;;) {
    std::optional<FreeRanges::Range> gone;
    {
      const std::lock_guard lock(mutex_);
      if (kept_.bytes() <= kept_bytes) return;
      gone = kept_.take_smallest(round_up(kept_.bytes() - kept_bytes, kFrameBytes));
    }
    ::madvise(at(gone->start), gone->bytes, MADV_DONTNEED);
    give_up_addresses(at(gone->start), gone->bytes);
  }
}

std::uint64_t FramePool::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_.bytes();
}

// ---- between addresses

std::optional<FramePool::Frames> FramePool::move_out(void* data, std::uint64_t bytes) {
  bytes = round_up(bytes, kFrameBytes);
  const Frames frames{take_addresses(bytes), bytes};
  const std::uint64_t moved = move(frames.data, data, bytes);
  if (moved == bytes) return frames;
  if (moved > 0) move(data, frames.data, moved);
  give_up_addresses(frames.data, bytes);
  return std::nullopt;
}

// The kernel may hold a frame for a while after a device has written to it or read it.
bool FramePool::move_in(Frames frames, void* data) noexcept {
  auto* const to = static_cast<char*>(data);
  auto* const from = static_cast<char*>(frames.data);
  try {
    const std::uint64_t moved = move(to, from, frames.bytes);
    if (moved < frames.bytes) replace(to + moved, from + moved, frames.bytes - moved);
  } catch (const std::exception&) {
    return false;
  }
  give_up_addresses(frames.data, frames.bytes);
  return true;
}

// With new frames that have the same bytes.
void FramePool::replace(char* to, char* from, std::uint64_t bytes) {
  void* const copy = take_addresses(bytes);
  make(static_cast<char*>(copy), bytes);
  std::memcpy(copy, from, bytes);
  if (move(to, copy, bytes) != bytes) throw std::bad_alloc();
  give_up_addresses(copy, bytes);
  ::madvise(from, bytes, MADV_DONTNEED);
}

// From the largest range that is kept on, and what is missing new.
void FramePool::gather(char* to, std::uint64_t bytes) {
  for (std::uint64_t done = 0; done < bytes;) {
    std::optional<FreeRanges::Range> piece;
    {
      const std::lock_guard lock(mutex_);
      piece = kept_.take_largest(bytes - done);
    }
    if (!piece) return make(to + done, bytes - done);
    const Frames frames{at(piece->start), piece->bytes};
    if (!move_in(frames, to + done)) {
      keep(frames);
      throw std::bad_alloc();
    }
    done += piece->bytes;
  }
}

void FramePool::make(char* to, std::uint64_t bytes) {
  const std::lock_guard lock(nursery_mutex_);
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min(kNurseryBytes, bytes - done);
    if (!populate(nursery_, part)) throw std::bad_alloc();
    if (move(to + done, nursery_, part) != part) throw std::bad_alloc();
    done += part;
  }
}

// The kernel refuses to move a frame that a forked process shares; writing to it gives this process its own.
std::uint64_t FramePool::move(void* to, void* from, std::uint64_t bytes) {
  const std::uint64_t moved = faults_.move(to, from, bytes);
  if (moved == bytes) return bytes;
  char* const rest = static_cast<char*>(from) + moved;
  if (!populate(rest, bytes - moved)) return moved;
  return moved + faults_.move(static_cast<char*>(to) + moved, rest, bytes - moved);
}

// ---- at a fork

// It keeps no frames, which the parent and the child would otherwise share.
void FramePool::before_fork() {
  trim(0);
  nursery_mutex_.lock();
  mutex_.lock();
}

void FramePool::after_fork_in_parent() {
  mutex_.unlock();
  nursery_mutex_.unlock();
}

}  // namespace reef
