#include "page/block_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "round_up.h"

namespace reef {
namespace {

constexpr std::size_t kMemoryPage = 4096;

}  // namespace

BlockCache::~BlockCache() { trim(0); }

// The smallest range that is large enough.
void* BlockCache::allocate(std::size_t bytes, std::uint64_t kept_bytes) {
  const std::size_t size = round_up(bytes, kMemoryPage);
  const std::lock_guard lock(mutex_);
  char* data = nullptr;
  if (const auto fits = by_size_.lower_bound({size, nullptr}); fits != by_size_.end()) {
    const auto [room, where] = *fits;
    take({room, where});
    if (room > size) keep(where + size, room - size);
    data = where;
  } else {
    trim_locked(kept_bytes);
    void* const fresh = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) return nullptr;
    data = static_cast<char*>(fresh);
  }
  in_use_.emplace(data, size);
  return data;
}

bool BlockCache::free(void* data) noexcept {
  if (reinterpret_cast<std::uintptr_t>(data) % kMemoryPage != 0) return false;
  const std::lock_guard lock(mutex_);
  const auto used = in_use_.find(data);
  if (used == in_use_.end()) return false;
  std::size_t size = used->second;
  auto* where = static_cast<char*>(data);
  in_use_.erase(used);
  auto after = kept_.lower_bound(where);
  if (after != kept_.end() && after->first == where + size) {
    const Range joined{after->second, after->first};
    size += joined.first;
    ++after;
    take(joined);
  }
  if (after != kept_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == where) {
      const Range joined{before->second, before->first};
      size += joined.first;
      where = joined.second;
      take(joined);
    }
  }
  keep(where, size);
  return true;
}

void BlockCache::trim(std::uint64_t kept_bytes) noexcept {
  if (this->kept_bytes() <= kept_bytes) return;
  const std::lock_guard lock(mutex_);
  trim_locked(kept_bytes);
}

// The smallest ranges first: they are of the least use.
void BlockCache::trim_locked(std::uint64_t kept_bytes) noexcept {
  while (kept_bytes_ > kept_bytes) {
    const auto [size, where] = *by_size_.begin();
    take({size, where});
    const std::size_t excess = round_up(kept_bytes_ + size - kept_bytes, kMemoryPage);
    const std::size_t gone = std::min(size, excess);
    ::munmap(where + size - gone, gone);
    if (size > gone) keep(where, size - gone);
  }
}

void BlockCache::keep(char* data, std::size_t bytes) {
  kept_.emplace(data, bytes);
  by_size_.emplace(bytes, data);
  kept_bytes_ += bytes;
}

void BlockCache::take(const Range& kept) noexcept {
  kept_bytes_ -= kept.first;
  kept_.erase(kept.second);
  by_size_.erase(Range(kept));
}

}  // namespace reef
