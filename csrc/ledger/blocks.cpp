#include "ledger/blocks.h"

#include <algorithm>

#include "ledger/birth.h"

namespace reef {

std::optional<std::size_t> slot_of(c10::Device device) {
  if (device.is_cpu()) return 0;
  if (!device.is_cuda() || device.index() < 0) return std::nullopt;
  const auto slot = static_cast<std::size_t>(device.index()) + 1;
  return slot < kDeviceSlots ? std::optional(slot) : std::nullopt;
}

c10::Device device_of(std::size_t slot) {
  if (slot == 0) return c10::kCPU;
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(slot - 1)};
}

Blocks& Blocks::instance() {
  static auto* const blocks = new Blocks;
  return *blocks;
}

void Blocks::tell(const Change& change) {
  CategoryBytes& live = live_[change.slot];
  live[change.category] += change.bytes;
  if (change.kind == TimelineEvent::Kind::kMove) live[change.from] -= change.bytes;
  for (ChangeListener* listener : listeners_) listener->changed(change, live);
}

std::int64_t Blocks::born(const void* data, std::size_t bytes, std::size_t slot) {
  const Category category = birth_category();
  const std::lock_guard lock(mutex_);
  const std::int64_t forgotten = forget(data);
  table_.insert({.address = reinterpret_cast<std::uint64_t>(data),
                 .bytes = bytes,
                 .device = slot,
                 .category = static_cast<std::uint8_t>(category)});
  tell({TimelineEvent::Kind::kAllocate, static_cast<std::int64_t>(bytes), slot, category, category,
        this_threads_birth().op});
  return forgotten;
}

std::int64_t Blocks::died(const void* data) {
  const std::lock_guard lock(mutex_);
  return forget(data);
}

std::int64_t Blocks::forget(const void* data) {
  Block* block = table_.find(reinterpret_cast<std::uint64_t>(data));
  if (block == nullptr) return 0;
  const auto bytes = static_cast<std::int64_t>(block->bytes);
  const auto category = static_cast<Category>(block->category);
  const std::size_t slot = block->device;
  table_.erase(block);
  tell({TimelineEvent::Kind::kFree, -bytes, slot, category, category, this_threads_birth().op});
  return bytes;
}

void Blocks::grow(const void* data, std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Block* block = table_.find(reinterpret_cast<std::uint64_t>(data));
  if (block == nullptr) return;
  block->bytes = static_cast<std::uint64_t>(static_cast<std::int64_t>(block->bytes) + bytes);
  const auto category = static_cast<Category>(block->category);
  const auto kind = bytes < 0 ? TimelineEvent::Kind::kFree : TimelineEvent::Kind::kAllocate;
  tell({kind, bytes, block->device, category, category, this_threads_birth().op});
}

bool Blocks::mark(const void* data, Category category) {
  const std::lock_guard lock(mutex_);
  Block* block = table_.find(reinterpret_cast<std::uint64_t>(data));
  if (block == nullptr) return false;
  const auto from = static_cast<Category>(block->category);
  if (from == category) return true;
  block->category = static_cast<std::uint8_t>(category);
  tell({TimelineEvent::Kind::kMove, static_cast<std::int64_t>(block->bytes), block->device, category, from,
        this_threads_birth().op});
  return true;
}

std::optional<Category> Blocks::category_of(const void* data) {
  const std::lock_guard lock(mutex_);
  const Block* block = table_.find(reinterpret_cast<std::uint64_t>(data));
  if (block == nullptr) return std::nullopt;
  return static_cast<Category>(block->category);
}

CategoryBytes Blocks::live(std::size_t slot) {
  const std::lock_guard lock(mutex_);
  return live_[slot];
}

void Blocks::sample(const std::string& counter, std::int64_t value) {
  const std::lock_guard lock(mutex_);
  for (ChangeListener* listener : listeners_) listener->sampled(counter, value);
}

void Blocks::add(ChangeListener* listener, std::array<CategoryBytes, kDeviceSlots>& snapshot) {
  const std::lock_guard lock(mutex_);
  listeners_.push_back(listener);
  snapshot = live_;
}

void Blocks::remove(ChangeListener* listener) {
  const std::lock_guard lock(mutex_);
  std::erase(listeners_, listener);
}

}  // namespace reef
