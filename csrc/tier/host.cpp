#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

#include "reef/error.h"
#include "reef/tier.h"

namespace reef {
namespace {

struct Free {
  void operator()(void* block) const { std::free(block); }
};

class HostTier final : public Tier {
 public:
  explicit HostTier(std::uint64_t capacity_bytes) { use_.capacity_bytes = capacity_bytes; }

  std::string name() const override { return "host"; }

  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes > use_.capacity_bytes - use_.used_bytes) return std::nullopt;
    std::unique_ptr<void, Free> data(std::malloc(bytes));
    if (data == nullptr) return std::nullopt;
    const Slot slot = next_slot_++;
    blocks_.emplace(slot, Block{std::move(data), bytes});
    use_.used_bytes += bytes;
    use_.peak_bytes = std::max(use_.peak_bytes, use_.used_bytes);
    return slot;
  }

  void give_back(Slot slot) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(slot);
    if (found == blocks_.end()) return;
    use_.used_bytes -= found->second.bytes;
    blocks_.erase(found);
  }

  void write(Slot slot, const void* data) override {
    const auto [block, bytes] = find(slot, true);
    std::memcpy(block, data, bytes);
  }

  void read(Slot slot, void* data) override {
    const auto [block, bytes] = find(slot, false);
    std::memcpy(data, block, bytes);
  }

  TierUse use() const override {
    const std::lock_guard lock(mutex_);
    return use_;
  }

 private:
  struct Block {
    std::unique_ptr<void, Free> data;
    std::uint64_t bytes;
  };

  std::pair<void*, std::uint64_t> find(Slot slot, bool writes) {
    const std::lock_guard lock(mutex_);
    const Block& block = blocks_.at(slot);
    (writes ? use_.written_bytes : use_.read_bytes) += block.bytes;
    return {block.data.get(), block.bytes};
  }

  mutable std::mutex mutex_;
  std::unordered_map<Slot, Block> blocks_;
  Slot next_slot_ = 0;
  TierUse use_;
};

}  // namespace

std::shared_ptr<Tier> host_tier(std::uint64_t capacity_bytes) {
  return std::make_shared<HostTier>(capacity_bytes);
}

}  // namespace reef
