#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ledger/allocation_gate.h"
#include "observer/observer.h"
#include "page/block_cache.h"
#include "page/memory.h"
#include "page/page_mover.h"
#include "page/page_table.h"
#include "page/step_follower.h"
#include "reef/swap.h"
#include "reef/tier.h"

namespace reef {

struct PagerCounts : MoveCounts {
  std::uint64_t minimum_bytes = 0;
};

struct PagerOptions {
  std::uint64_t budget_bytes = 0;
  std::vector<std::shared_ptr<Tier>> tiers;
  bool prefetch = true;  ///< move pages beside the operators, once a step is known
};

/// Keeps what LibTorch's allocator has handed out of one memory within a budget, by moving pages to tiers and
/// back. One for each device, asleep until start(); never destroyed, since memory is freed until the very
/// end. It decides: the table keeps the pages, the mover moves them, the follower knows what comes next.
class Pager final : public AllocationGate {
 public:
  /// Throws ConfigError where there is no such device.
  static Pager& of(c10::Device device);
  static Pager& cpu();
  /// Of a device that has a budget now, or nullptr; of any kind of device.
  static Pager* running(c10::Device device);
  c10::Device device() const { return memory_->device(); }

  /// Throws ConfigError if it is running.
  void start(PagerOptions options);
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

  struct Use {
    c10::StorageImpl* storage;
    bool writes;
    bool parameter;  ///< a leaf that requires a gradient
  };
  enum class Register : std::uint8_t {
    kNone,               ///< only pages known already, and parameters, are of interest
    kAll,                ///< storages not met before become pages
    kWrittenWithAKnown,  ///< those written become pages if another storage of the operator is one: optimizer
                         ///< state
  };
  /// The pages that one thread's running operators use, pinned until the outermost of them ends.
  class Frame {
   public:
    /// An operator starts: its pages are brought in and pinned. What fails is kept, and thrown by this
    /// thread's next allocation within the operator; until then the storage throws when accessed.
    void enter(Pager& pager, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses);
    /// It ends, with these new storages.
    void leave(Pager& pager, const OperatorCall& call, Register what, c10::ArrayRef<Use> results) noexcept;

    /// The outermost operator that runs, nullptr outside.
    const std::string* op() const { return op_; }

   private:
    void bring_in(Pager& pager, std::size_t first, const StepFollower::Uses& used);

    friend class Pager;
    std::exception_ptr failed_;  ///< a page could not be brought in
    const std::string* op_ = nullptr;
    int depth_ = 0;
    bool knew_ = false;                               ///< the outermost operator used a page
    std::size_t position_ = StepFollower::kUntraced;  ///< of the outermost operator, in its step
    std::vector<Page*> pinned_;
  };
  Frame& this_threads_frame() const;

  PagerCounts counts() const;
  void reset_counts();
  /// The step that is or was followed last; empty if none was.
  Trace trace() const;
  /// Alive beside its pages, at most.
  std::uint64_t fixed_bytes() const;
  SwapSpeeds speeds() const;
  std::vector<std::shared_ptr<Tier>> tiers() const;
  const Memory& memory() const { return *memory_; }

  /// A time since when somebody looks at what was alive.
  struct Mark {
    std::uint64_t peak_bytes = 0;     ///< since then
    std::uint64_t evicted_bytes = 0;  ///< in all, until then
    std::uint64_t start = 0;          ///< how many budgets there had been; 0: not set yet
  };
  /// Is kept up to date until it is removed. It must not move.
  void add(Mark& mark);
  void remove(Mark& mark);
  /// It is now.
  void set(Mark& mark);
  /// Bytes of the budget that were free when most was alive, since then; negative: of the pages that have
  /// left since. 0 if there was another budget then. Nothing: there is none now.
  std::optional<std::int64_t> left_bytes(const Mark& mark);
  /// The most that was alive since start() or reset_peak().
  std::uint64_t peak_bytes();
  void reset_peak();

  /// Memory has run out: what can leave does, until so many bytes are free. False if nothing did, or if
  /// another thread is at work with the pages.
  bool free_some(std::uint64_t bytes) noexcept;
  /// The error for an allocation of `bytes` that found no room.
  void refuse_allocation(std::uint64_t bytes);

  // AllocationGate
  bool before_allocate(std::size_t bytes) override;
  void after_allocate(std::size_t bytes) noexcept override;
  void* allocate(std::size_t bytes) override;
  void freed(const void* data) noexcept override;
  bool take_back(void* data) noexcept override { return blocks_.free(data); }

 private:
  explicit Pager(std::unique_ptr<Memory> memory);
  void take_freed();
  std::string running_operator() const;
  Page* find_or_register(c10::StorageImpl& storage);
  void make_resident(Page& page);
  void make_room(std::uint64_t bytes);
  void make_room_ahead(std::size_t position, const StepFollower::Uses& uses);
  void check_stream(Page& page, std::uint64_t stream);
  Page* victim();
  bool push_out(Page& page);
  std::uint64_t alive_bytes(std::uint64_t bytes) const;
  void see_peak();
  std::uint64_t kept_bytes(std::uint64_t bytes) const;
  std::uint64_t needed_bytes(std::uint64_t bytes) const;
  [[noreturn]] void refuse(std::uint64_t bytes);
  [[noreturn]] void refuse_without_tier(const Page& page, std::uint64_t bytes);
  static void storage_died(void* page);

  void end_step();
  void move_ahead(std::size_t position);

  struct Entry;  // marks the thread as inside, and holds the lock

  mutable std::mutex mutex_;
  std::atomic<bool> running_ = false;
  std::atomic<std::uint64_t> budget_bytes_ = 0;
  std::atomic<std::uint64_t> reserved_bytes_ = 0;  ///< promised to allocations under way
  std::uint64_t minimum_bytes_ = 0;
  std::uint64_t clock_ = 0;
  const std::size_t slot_;  ///< the device's number
  std::unique_ptr<Memory> memory_;
  StepFollower step_;
  PageTable table_;
  PageMover mover_;
  BlockCache blocks_;
  Mark own_mark_;  ///< of reset_peak()
  std::vector<Mark*> marks_;
  std::uint64_t starts_ = 0;
  std::uint64_t evicted_before_step_ = 0;  ///< bytes, in all, when the step under way began
  std::deque<std::uint32_t> fetches_;      ///< planned, by page id, and waiting for room
};

}  // namespace reef
