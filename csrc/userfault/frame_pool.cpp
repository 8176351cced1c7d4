#include "userfault/frame_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <system_error>

namespace reef {
namespace {

// Made at once, at most.
constexpr std::uint64_t kNurseryBytes = std::uint64_t{16} << 20;

std::uint64_t address(const void* data) { return reinterpret_cast<std::uint64_t>(data); }
char* at(std::uint64_t start) { return reinterpret_cast<char*>(start); }

}  // namespace

FramePool::Addresses::Addresses(std::uint64_t bytes, std::uint64_t frame_bytes)
    : mapping_bytes_(bytes + frame_bytes - kFrameBytes) {
  mapping_ = ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  begin_ = at(round_up(address(mapping_), frame_bytes));
  // Advice, of which none is needed.
  ::madvise(mapping_, mapping_bytes_, MADV_DONTDUMP);
  ::madvise(mapping_, mapping_bytes_, frame_bytes == kFrameBytes ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
}

FramePool::Addresses::~Addresses() { ::munmap(mapping_, mapping_bytes_); }

FramePool::FramePool(UserFault& faults, std::uint64_t bytes, std::uint64_t frame_bytes)
    : AtFork(Order::kBlocks),
      faults_(faults),
      frame_bytes_(frame_bytes),
      bytes_(whole(bytes)),
      addresses_(bytes_, frame_bytes),
      nursery_(kNurseryBytes, frame_bytes),
      begin_(addresses_.begin()) {
  faults_.watch(begin_, bytes_);
  empty_.add(address(begin_), bytes_);
}

// ---- frames

FramePool::Frames FramePool::take(std::uint64_t bytes) {
  bytes = whole(bytes);
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
  const auto start = empty_.take(whole(bytes));
  if (!start) throw std::bad_alloc();
  return at(*start);
}

void FramePool::give_up_addresses(const void* data, std::uint64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  empty_.add(address(data), whole(bytes));
}

void FramePool::trim(std::uint64_t kept_bytes) noexcept {
  for (;;) {
    std::optional<FreeRanges::Range> gone;
    {
      const std::lock_guard lock(mutex_);
      if (kept_.bytes() <= kept_bytes) return;
      gone = kept_.take_smallest(whole(kept_.bytes() - kept_bytes));
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
  bytes = whole(bytes);
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
    if (!populate(nursery_.begin(), part)) throw std::bad_alloc();
    if (move(to + done, nursery_.begin(), part) != part) throw std::bad_alloc();
    done += part;
  }
  // Where the system had no large frames left there are tables for small ones now, until it is told so.
  if (frame_bytes_ > kFrameBytes) ::madvise(nursery_.begin(), kNurseryBytes, MADV_DONTNEED);
}

// The kernel refuses to move a frame that a forked process shares, until writing to it has given this process
// its own; and what is left of a large frame that was shared, until it has been copied into a whole one.
std::uint64_t FramePool::move(void* to, void* from, std::uint64_t bytes) {
  std::uint64_t moved = 0;
  const auto move_rest = [&] {
    moved += faults_.move(static_cast<char*>(to) + moved, static_cast<char*>(from) + moved, bytes - moved);
    return moved == bytes;
  };
  if (move_rest() || !populate(static_cast<char*>(from) + moved, bytes - moved) || move_rest()) return moved;
  if (moved > 0) faults_.move(from, to, moved);
  moved = 0;
  if (collapse(from, bytes)) move_rest();
  return moved;
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
