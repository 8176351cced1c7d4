#include "page/block_cache.h"

#include <sys/mman.h>

#include "round_up.h"
#include "userfault/frames.h"

namespace reef {
BlockCache::~BlockCache() { trim(0); }

void* BlockCache::allocate(std::size_t bytes, std::uint64_t kept_bytes) {
  const std::size_t size = round_up(bytes, kFrameBytes);
  const std::lock_guard lock(mutex_);
  void* data = nullptr;
  if (const auto fits = kept_.take(size)) {
    kept_bytes_ = kept_.bytes();
    data = reinterpret_cast<void*>(*fits);
  } else {
    trim_locked(kept_bytes);
    data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return nullptr;
  }
  in_use_.emplace(data, size);
  return data;
}

bool BlockCache::free(void* data) noexcept {
  if (reinterpret_cast<std::uintptr_t>(data) % kFrameBytes != 0) return false;
  const std::lock_guard lock(mutex_);
  const auto used = in_use_.find(data);
  if (used == in_use_.end()) return false;
  kept_.add(reinterpret_cast<std::uintptr_t>(data), used->second);
  kept_bytes_ = kept_.bytes();
  in_use_.erase(used);
  return true;
}

void BlockCache::trim(std::uint64_t kept_bytes) noexcept {
  if (this->kept_bytes() <= kept_bytes) return;
  const std::lock_guard lock(mutex_);
  trim_locked(kept_bytes);
}

// Unmaps the smallest ranges first, because they are the least useful.
void BlockCache::trim_locked(std::uint64_t kept_bytes) noexcept {
  while (kept_.bytes() > kept_bytes) {
    const auto gone = kept_.take_smallest(round_up(kept_.bytes() - kept_bytes, kFrameBytes));
    ::munmap(reinterpret_cast<void*>(gone->start), gone->bytes);
  }
  kept_bytes_ = kept_.bytes();
}

}  // namespace reef
