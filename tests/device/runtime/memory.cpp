#include "device/runtime/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "device/runtime/played_cuda.h"

namespace reef::played {
namespace {

constexpr std::size_t kAddresses = std::size_t{1} << 38;  // For each device.
constexpr std::size_t kPageBytes = 4096;

std::size_t whole_pages(std::size_t bytes) {
  return (std::max(bytes, std::size_t{1}) + kPageBytes - 1) / kPageBytes * kPageBytes;
}

void must(bool succeeded, const char* what) {
  if (succeeded) return;
  std::perror(what);
  std::abort();
}

char* mapped(int file) {
  void* const at = mmap(nullptr, kAddresses, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  must(at != MAP_FAILED, "played device memory");
  return static_cast<char*>(at);
}

// Allocates a protection key that is closed to all threads: a thread opens it for itself, without the
// kernel's help. Returns -1 where the processor has none, and if REEF_PLAYED_WITHOUT_KEYS is set.
int protection_key() {
#ifdef PKEY_DISABLE_ACCESS
  if (std::getenv("REEF_PLAYED_WITHOUT_KEYS") == nullptr) return pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
  return -1;
}

}  // namespace

DeviceMemory::DeviceMemory(int device)
    : device_(device), file_(memfd_create("played device", MFD_CLOEXEC)), key_(protection_key()) {
  must(file_ >= 0 && ftruncate(file_, kAddresses) == 0, "played device memory");
  given_ = mapped(file_);
  reached_ = mapped(file_);
}

void* DeviceMemory::allocate(std::size_t bytes) {
  const std::size_t wanted = whole_pages(bytes);
  const std::lock_guard lock(mutex_);
  if (refusals.refuses() || used_bytes_ + wanted > kTotalBytes) return nullptr;
  std::size_t offset = 0;  // The first gap that also has room for an inaccessible page on each side.
  for (const auto& [begin, taken] : blocks_) {
    if (begin >= offset + wanted + kPageBytes) break;
    offset = begin + taken + kPageBytes;
  }
  if (offset + wanted > kAddresses) return nullptr;
  must(mprotect(reached_ + offset, wanted, PROT_READ | PROT_WRITE) == 0, "played device memory");
  blocks_[offset] = wanted;
  used_bytes_ += wanted;
  if (offset + wanted > end_) {
    end_ = offset + wanted;
    if (key_ >= 0)
      must(pkey_mprotect(given_, end_, PROT_READ | PROT_WRITE, key_) == 0, "played device memory");
  }
  return given_ + offset;
}

bool DeviceMemory::free(void* data) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(offset_of(data));
  if (block == blocks_.end()) return false;
  const auto [offset, bytes] = *block;
  must(mprotect(reached_ + offset, bytes, PROT_NONE) == 0, "played device memory");
  must(fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                 static_cast<off_t>(bytes)) == 0,
       "played device memory");
  used_bytes_ -= bytes;
  blocks_.erase(block);
  return true;
}

std::optional<Block> DeviceMemory::find(const void* data) const {
  if (reach(data) == nullptr) return {};
  const std::lock_guard lock(mutex_);
  const auto next = blocks_.upper_bound(offset_of(data));
  if (next == blocks_.begin()) return {};
  const auto [offset, bytes] = *std::prev(next);
  if (offset_of(data) >= offset + bytes) return {};
  return Block{bytes, device_};
}

void* DeviceMemory::reach(const void* data) const {
  const auto* const at = static_cast<const char*>(data);
  return at >= given_ && at < given_ + kAddresses ? reached_ + (at - given_) : nullptr;
}

std::size_t DeviceMemory::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return kTotalBytes - used_bytes_;
}

void DeviceMemory::open(bool opened) {
  if (key_ >= 0) {
    must(pkey_set(key_, opened ? 0 : PKEY_DISABLE_ACCESS) == 0, "played device memory");
    return;
  }
  const std::lock_guard lock(mutex_);
  must(mprotect(given_, end_, opened ? PROT_READ | PROT_WRITE : PROT_NONE) == 0, "played device memory");
}

void* HostMemory::allocate(std::size_t bytes) {
  if (refusals.refuses()) return nullptr;
  const std::size_t wanted = whole_pages(bytes);
  void* const at =
      mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  const std::lock_guard lock(mutex_);
  blocks_[static_cast<const char*>(at)] = wanted;
  bytes_ += wanted;
  return at;
}

bool HostMemory::free(void* data) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(static_cast<const char*>(data));
  if (block == blocks_.end()) return false;
  munmap(data, block->second);
  bytes_ -= block->second;
  blocks_.erase(block);
  return true;
}

std::optional<Block> HostMemory::find(const void* data) const {
  const auto* const at = static_cast<const char*>(data);
  const std::lock_guard lock(mutex_);
  const auto next = blocks_.upper_bound(at);
  if (next == blocks_.begin()) return {};
  const auto [begin, bytes] = *std::prev(next);
  if (at >= begin + bytes) return {};
  return Block{bytes, -1};
}

std::size_t HostMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

// Never destroyed, because streams work until the process ends.
DeviceMemory& device_memory(int device) {
  static auto* const all = new DeviceMemory[kDevices]{DeviceMemory(0), DeviceMemory(1)};
  return all[device];
}
HostMemory& host_memory() {
  static auto* const memory = new HostMemory;
  return *memory;
}

std::optional<Block> find_block(const void* data) {
  for (int device = 0; device < kDevices; ++device)
    if (const auto block = device_memory(device).find(data)) return block;
  return host_memory().find(data);
}

void* reach(const void* address) {
  for (int device = 0; device < kDevices; ++device)
    if (void* const at = device_memory(device).reach(address)) return at;
  return const_cast<void*>(address);
}

}  // namespace reef::played
