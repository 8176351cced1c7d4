#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ledger/allocation_gate.h"
#include "page/page.h"
#include "reef/tier.h"

namespace reef {

struct PagerCounts {
  std::uint64_t faults = 0;
  std::uint64_t evictions = 0;
  std::uint64_t clean_evictions = 0;  ///< of these, without writing
  std::uint64_t bytes_in = 0;
  std::uint64_t bytes_out = 0;
  double waited_seconds = 0;  ///< the training thread's, in both
  std::uint64_t minimum_bytes = 0;
};

/// Keeps what the counting allocator has handed out within a budget, by moving pages to tiers and back. One
/// for the process's CPU memory, asleep until start(); never destroyed, since memory is freed until the very
/// end.
class Pager final : public AllocationGate {
 public:
  static Pager& cpu();

  /// Throws ConfigError if it is running.
  void start(std::uint64_t budget_bytes, std::vector<std::shared_ptr<Tier>> tiers);
  /// Every page comes back. Throws what the last failing read threw, after trying them all; then it goes on
  /// running, with no limit, and may be stopped again.
  void stop();
  /// Stops at once. Pages that are away stay so, and an access to one throws.
  void abandon() noexcept;
  bool running() const { return running_; }

  std::uint64_t budget_bytes() const;
  /// Evicts until it holds; throws BudgetError, and changes nothing, if it cannot.
  void set_budget_bytes(std::uint64_t bytes);

  /// `tensor`'s storage becomes a page, if it can be one.
  void adopt(const at::Tensor& tensor);
  /// While pinned, a page stays in memory. Faults it in first.
  void pin(const at::Tensor& tensor);
  void unpin(const at::Tensor& tensor);

  /// The pages that one thread's running operators use, pinned until the outermost of them ends.
  class Frame {
   public:
    struct Use {
      c10::StorageImpl* storage;
      bool writes;
    };
    enum class Register : std::uint8_t {
      kNone,               ///< only pages known already are of interest
      kAll,                ///< storages not met before become pages
      kWrittenWithAKnown,  ///< those written become pages if another storage of the operator is one:
                           ///< optimizer state
    };
    /// An operator starts: its pages are brought in and pinned. What fails is kept, and thrown by this
    /// thread's next allocation within the operator; until then the storage throws when accessed. True if any
    /// of them was a page.
    bool enter(c10::ArrayRef<Use> uses, Register what);
    /// It ends, with these new storages.
    void leave(c10::ArrayRef<Use> results, Register what) noexcept;
    int depth() const { return depth_; }

   private:
    int depth_ = 0;
    std::vector<Page*> pinned_;
  };
  static Frame& this_threads_frame();

  PagerCounts counts() const;
  void reset_counts();

  // AllocationGate
  bool before_allocate(std::size_t bytes) override;
  void after_allocate(std::size_t bytes) noexcept override;
  void freed(const void* data) noexcept override;

 private:
  Pager();
  Page* find(c10::StorageImpl& storage);
  Page* find_or_register(c10::StorageImpl& storage);
  void make_resident(Page& page);
  void make_room(std::uint64_t bytes);
  Page* victim();
  void evict(Page& page);
  void write_out(Page& page, const void* data);
  void fault(Page& page, c10::StorageImpl& storage);
  void add_pin(Page& page);
  void drop_pin(Page& page);
  void drop(Page& page);
  std::uint64_t needed_bytes(std::uint64_t bytes) const;
  static void storage_died(void* page);

  struct Entry;  // marks the thread as inside, and holds the lock

  mutable std::mutex mutex_;
  std::atomic<bool> running_ = false;
  std::uint64_t budget_bytes_ = 0;
  std::uint64_t reserved_bytes_ = 0;   ///< promised to allocations under way
  std::uint64_t evictable_bytes_ = 0;  ///< of pages in memory without a pin
  std::uint64_t clock_ = 0;
  std::vector<std::shared_ptr<Tier>> tiers_;
  std::vector<std::unique_ptr<Page>> pages_;
  boost::unordered_flat_map<const void*, Page*> by_data_;  ///< pages in memory
  PagerCounts counts_;
};

}  // namespace reef
