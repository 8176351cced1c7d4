#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/SmallVector.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "page/memory.h"
#include "page/page.h"
#include "reef/tier.h"

namespace reef {

/// Holds a pager's lock while something is decided. Nothing that can block may happen under the lock: no
/// input or output, no owning reference to a storage, nothing of Python's. Blocks, whose allocators have
/// locks of their own, transfers, and room in tiers are therefore dropped only after the lock has been
/// released.
class Decision {
 public:
  explicit Decision(std::mutex& mutex) : lock_(mutex) {}
  ~Decision() {
    lock_.unlock();
    for (const auto& [memory, tier, slot] : slots_) memory->give_back(tier, slot);
  }
  Decision(const Decision&) = delete;
  Decision& operator=(const Decision&) = delete;

  /// Waits, with the lock released, until another thread has made the condition true.
  template <class IsSo>
  void wait(std::condition_variable& changed, const IsSo& is_so) {
    changed.wait(lock_, is_so);
  }

  void drop(c10::DataPtr block) {
    if (block) blocks_.push_back(std::move(block));
  }
  /// A transfer may own objects of the thread that submitted it, including Python's.
  void drop(std::shared_ptr<Transfer> transfer) {
    if (transfer != nullptr) transfers_.push_back(std::move(transfer));
  }
  /// Gives up the room of the page, which is of `memory`, in its tier.
  void drop_slot(Page& page, Memory& memory) {
    if (page.slot) slots_.push_back({&memory, std::exchange(page.tier, nullptr), *page.slot});
    page.slot.reset();
    page.keeps = false;
  }

 private:
  c10::SmallVector<c10::DataPtr, 1> blocks_;
  c10::SmallVector<std::shared_ptr<Transfer>, 1> transfers_;
  struct DroppedSlot {
    Memory* memory;
    std::shared_ptr<Tier> tier;
    Tier::Slot slot;
  };
  c10::SmallVector<DroppedSlot, 1> slots_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace reef
