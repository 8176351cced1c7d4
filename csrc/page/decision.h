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

/// Holds a pager's lock while something is decided. The lock covers nothing that can wait: no input or
/// output, no reference to a storage, nothing of Python's. What is let go of meanwhile is dropped when the
/// lock has been released: blocks, which go back to allocators with locks of their own, and room in tiers.
class Decision {
 public:
  explicit Decision(std::mutex& mutex) : lock_(mutex) {}
  ~Decision() {
    lock_.unlock();
    for (const auto& [memory, tier, slot] : slots_) memory->give_back(tier, slot);
  }
  Decision(const Decision&) = delete;
  Decision& operator=(const Decision&) = delete;

  /// Without the lock, until another thread has changed it to be so.
  template <class IsSo>
  void wait(std::condition_variable& changed, const IsSo& is_so) {
    changed.wait(lock_, is_so);
  }

  void drop(c10::DataPtr block) {
    if (block) blocks_.push_back(std::move(block));
  }
  /// It may have what the thread that submitted it had, objects of Python's among it.
  void drop(std::shared_ptr<Transfer> transfer) {
    if (transfer != nullptr) transfers_.push_back(std::move(transfer));
  }
  /// The bytes of the page, which is of `memory`, are in no tier any longer.
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
