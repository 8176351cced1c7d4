#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "fork.h"
#include "reef/tier.h"
#include "tier/slots.h"

namespace reef {
namespace {

struct Free {
  void operator()(void* block) const { std::free(block); }
};

class HostTier final : public Tier {
 public:
  explicit HostTier(std::uint64_t capacity_bytes) : slots_(capacity_bytes) {}

  std::string name() const override { return "host"; }

  std::optional<Slot> take(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes > slots_.free_bytes()) return std::nullopt;
    std::unique_ptr<void, Free> data(std::malloc(bytes));
    if (data == nullptr) return std::nullopt;
    return slots_.add({std::move(data), bytes}, bytes);
  }

  std::optional<Slot> keep(std::uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    if (bytes > slots_.free_bytes()) return std::nullopt;
    return slots_.add({nullptr, bytes}, bytes);
  }

  void give_back(Slot slot) noexcept override {
    const std::lock_guard lock(mutex_);
    slots_.remove(slot);
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
    return slots_.use;
  }

 private:
  struct Block {
    std::unique_ptr<void, Free> data;
    std::uint64_t bytes;
  };

  std::pair<void*, std::uint64_t> find(Slot slot, bool writes) {
    const std::lock_guard lock(mutex_);
    const Block& block = slots_.at(slot);
    (writes ? slots_.use.written_bytes : slots_.use.read_bytes) += block.bytes;
    return {block.data.get(), block.bytes};
  }

  mutable MutexAtFork mutex_{AtFork::Order::kTier};
  Slots<Block> slots_;
};

}  // namespace

std::shared_ptr<Tier> host_tier(std::uint64_t capacity_bytes) {
  return std::make_shared<HostTier>(capacity_bytes);
}

}  // namespace reef
