#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fork.h"
#include "ledger/allocation_gate.h"
#include "observer/observer.h"
#include "page/block_cache.h"
#include "page/decision.h"
#include "page/frame.h"
#include "page/memory.h"
#include "page/no_address.h"
#include "page/page_mover.h"
#include "page/page_table.h"
#include "page/pager_errors.h"
#include "page/peaks.h"
#include "page/refusals.h"
#include "page/stable_address.h"
#include "page/step_follower.h"
#include "reef/addresses.h"
#include "reef/swap.h"
#include "reef/tier.h"

namespace reef {

struct PagerCounts : MoveCounts {
  std::uint64_t minimum_bytes = 0;
};

struct PagerOptions {
  std::uint64_t budget_bytes = 0;
  std::uint64_t expected_bytes =
      0;  ///< what the budget will soon be, which decides how large pages are; 0: the same
  std::vector<std::shared_ptr<Tier>> tiers;
  bool prefetch = true;  ///< move pages ahead of the operators, on other threads, once a step is known
  Addresses addresses = Addresses::kAutomatic;
  /// Where addresses stay: refuse a working set that exceeds the budget, instead of moving pages while it is
  /// worked on. Where they do not there is no choice.
  bool strict = false;
  /// Where addresses stay: whoever touches what is away without an operator waits while no tier has room.
  bool wait_while_full = false;
};

class FaultTrouble;

/// Keeps what LibTorch's allocator hands out of one device's memory within a budget, by moving pages to tiers
/// and back. There is one pager for each device; it is asleep until start(), and never destroyed, because
/// memory is freed until the process ends. It decides: the table keeps the pages, the mover moves them, and
/// the follower predicts what comes next.
///
/// Its lock covers decisions only (decision.h). A thread that needs room or a page does the work for it
/// itself, and waits at most for the input and output of others.
class Pager final : public AllocationGate, private AtFork {
 public:
  /// Throws ConfigError where there is no such device.
  static Pager& of(c10::Device device);
  static Pager& cpu();
  /// Returns the pager of a device of any kind if it has a budget now, else nullptr.
  static Pager* running(c10::Device device);
  c10::Device device() const { return memory_->device(); }

  // ---- pager.cpp

  /// Begins a budget and returns its number, which tells later whether that budget is still in force. Throws
  /// ConfigError if one is in force already.
  std::uint64_t start(PagerOptions options);
  /// Ends the budget and brings every page back. If reads fail it tries them all, and throws what the last
  /// failing one threw; the budget goes on then, without a limit, and may be stopped again. Does nothing if
  /// another budget has begun since.
  void stop(std::uint64_t number);
  /// Ends the budget at once. Pages that are away stay away, and an access to one throws.
  void abandon(std::uint64_t number) noexcept;
  bool running() const { return mode_ == Mode::kRunning; }
  /// Whether it must be told of frees, because it runs or still has pages.
  bool listens() const { return listens_; }
  /// Throws ConfigError unless that budget is in force. In a forked child none is.
  void check_in_force(std::uint64_t number) const;

  std::uint64_t budget_bytes() const;
  /// Changes the budget, and evicts until it holds. Throws BudgetError, and keeps the old budget, if it
  /// cannot. If the budget grows, brings pages back as far as there is room. Throws what a tier throws.
  void set_budget_bytes(std::uint64_t bytes);
  /// Allows so many bytes beside the budget until disallow(), which evicts what exceeds it then.
  void allow(std::uint64_t bytes);
  void disallow(std::uint64_t bytes) noexcept;

  /// Makes the tensor's storage a page, if it can be one, and gives it the name that the program knows.
  void adopt(const at::Tensor& tensor, const std::string& name = {});
  /// Brings the tensor's pages in, and keeps them in memory until unpin(), also when the budget ends and
  /// another begins.
  void pin(const at::Tensor& tensor);
  void unpin(const at::Tensor& tensor) noexcept;
  /// Returns the bytes of the tensor's pages that could leave.
  std::uint64_t evictable_bytes(const at::Tensor& tensor);

  PagerCounts counts() const;
  void reset_counts();
  /// Returns the step that is or was followed last; it is empty if none was.
  Trace trace() const;
  /// Returns the most that was alive at once beside the pages.
  std::uint64_t fixed_bytes() const;
  SwapSpeeds speeds() const;
  const Memory& memory() const { return *memory_; }

  /// Keeps the mark up to date until remove(). The mark must not move.
  void add(PeakMark& mark);
  void remove(PeakMark& mark);
  /// Sets the mark to now.
  void set(PeakMark& mark);
  /// Returns how many bytes of the budget were free when most was alive since the mark; if pages have left
  /// since, minus their bytes. Returns 0 if another budget was in force at the mark, and nothing if none is
  /// now.
  std::optional<std::int64_t> left_bytes(const PeakMark& mark);
  /// Returns the most that was alive at once since start() or reset_peak().
  std::uint64_t peak_bytes();
  void reset_peak();

  // ---- pager_operators.cpp

  struct Use {
    c10::StorageImpl* storage;
    bool writes;
    bool parameter;  ///< a leaf that requires a gradient
  };
  /// Which storages become pages, beside parameters and what an operator on a known page writes or makes.
  enum class Register : std::uint8_t { kNone, kAll };
  /// Brings in and pins the pages of an operator that has a kernel of its own and starts now. Throws nothing:
  /// why a page did not come is thrown by this thread's next allocation within the operator, and until then
  /// the storage throws when it is accessed; anything else that fails is thrown by the next allocation.
  void enter(const OperatorCall& call, Register what, c10::ArrayRef<Use> uses);
  /// Ends what enter() began; `results` are the operator's new storages. With `then`, its pages stay pinned
  /// until `*then` is called.
  using LetGo = std::function<void()>;
  void leave(const OperatorCall& call, Register what, c10::ArrayRef<Use> results,
             LetGo* then = nullptr) noexcept;
  /// Brings in what something that calls operators was given, and pins it until leave_around(); with `keeps`
  /// also what is made meanwhile, because the caller may keep raw pointers.
  void enter_around(const OperatorCall& call, bool keeps, c10::ArrayRef<Use> uses);
  void leave_around(const OperatorCall& call) noexcept;

  /// Lets these storages keep their addresses until they are freed, if need be by staying in memory.
  void keep(c10::ArrayRef<Use> uses);

  // ---- pager_room.cpp

  Frame& this_threads_frame() const { return Frame::of_this_thread(slot_); }

  /// Throws why an allocation of this thread's is refused; of an operator that would go on with less memory,
  /// and compute something else, as a c10::Error that it does not catch. If it catches that, too, the next
  /// allocation is told.
  [[noreturn]] void refuse(const std::exception_ptr& error);
  /// Evicts pages of so many bytes or more, because what is free does not lie side by side. Returns false if
  /// none could leave.
  bool free_some(std::uint64_t bytes) noexcept;
  bool reserve_more(std::uint64_t bytes) { return memory_->reserve_more(bytes); }

  /// Whether new pages keep their addresses while they are away.
  bool addresses_stay() const { return stable_ != nullptr; }
  /// Returns "stay", or why addresses do not stay, or not for system calls.
  std::string addresses() const;

  // AllocationGate
  bool before_allocate(std::size_t bytes) override;
  void after_allocate(std::size_t bytes) noexcept override;
  void* allocate(std::size_t bytes) override;
  bool gives_memory() const noexcept override { return running(); }
  bool freed(const void* data) noexcept override;
  bool counts_itself(const void* data) const noexcept override { return stable_of(data) != nullptr; }
  bool take_back(void* data) noexcept override;

  /// Forgets an evicted page whose storage has been destroyed.
  void storage_died(Page& page) noexcept;

 private:
  enum class Mode : std::uint8_t {
    kAsleep,
    kRunning,
    kForked,  ///< a forked child of a process with a budget: pages come back when wanted, and none leaves
  };
  static constexpr std::uint64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

  explicit Pager(std::unique_ptr<Memory> memory);
  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

  // ---- called with the lock held
  using Pages = c10::SmallVector<Page*, 4>;
  void find(c10::StorageImpl& storage, c10::SmallVectorImpl<Page*>& found, const Decision& decision);
  Pages find(c10::StorageImpl& storage, const Decision& decision);
  Pages find_or_register(c10::StorageImpl& storage, Decision& decision);
  void adopt(Page& page);
  void learn(Page& page);
  void let_go(Page& page);
  void take_freed(Decision& decision);
  void forget_all(Decision& decision);
  void listen_while_needed(const Decision&);
  bool try_claim(std::uint64_t bytes);
  std::uint64_t note_needed(std::uint64_t bytes, const Decision&);
  std::uint64_t needed_bytes(std::uint64_t bytes) const;
  void stay(Page& page);
  void see_peaks(const Decision&);
  void operator_runs(const Frame& frame, const Decision&);
  /// The pages of several storages, one storage after another.
  struct Known {
    c10::SmallVector<Page*, 8> pages;
    c10::SmallVector<std::size_t, 8> ends;  ///< by storage, in `pages`
    c10::ArrayRef<Page*> of(std::size_t i) const {
      const std::size_t begin = i == 0 ? 0 : ends[i - 1];
      return {pages.data() + begin, ends[i] - begin};
    }
  };
  void enter_operator(Frame& frame, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses);
  void enter_caller(const OperatorCall& call, bool keeps, c10::ArrayRef<Use> uses);
  void begin_uses(Frame& frame, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses,
                  const Known& known, Decision& decision);
  static StepFollower::Uses learned_uses(c10::ArrayRef<Use> uses, const Known& known);
  static StepFollower::Uses learned_uses(const Frame& frame);
  LetGo held_until_called(const Frame& frame);
  void end_uses(c10::ArrayRef<Frame::Use> used, c10::ArrayRef<const void*> unknown);
  RoomWanted wanted_room(std::uint64_t bytes, const Decision&) const;

  // ---- called without the lock

  /// Which pages may leave to make room: those that nobody uses, or also those in use, where addresses stay.
  /// kForTouched is for a page that was touched without an operator: as kUsed, but the last ones that were
  /// touched stay. With kNone no page leaves, and the budget is exceeded by what comes.
  enum class MayLeave : std::uint8_t { kNone, kUnused, kUsed, kForTouched };
  /// Waits for collectives that hold pages, if there is no other room.
  bool find_room(std::uint64_t bytes, MayLeave which);
  bool find_room_now(std::uint64_t bytes, MayLeave which);
  void make_room(std::uint64_t bytes);
  bool make_resident(const PagePtr& page, c10::StorageImpl* owner, bool writes, MayLeave which);
  void need_resident(const PagePtr& page, c10::StorageImpl* owner, bool writes);
  MayLeave most() const { return uses_more_than_fits_ ? MayLeave::kUsed : MayLeave::kUnused; }

  StableAddress& stable() const { return *stable_.load(std::memory_order_acquire); }
  template <class Visit>
  void each_stable(const Visit& visit) const {
    for (const auto& stable : staying_) {
      if (StableAddress* const made = stable.load(std::memory_order_acquire)) visit(*made);
    }
  }
  /// Returns whose address it is, or nullptr.
  StableAddress* stable_of(const void* data) const {
    StableAddress* of = nullptr;
    each_stable([&](StableAddress& stable) {
      if (stable.has_address(data)) of = &stable;
    });
    return of;
  }

  // ---- where addresses stay: pager_heap.cpp, pager_faults.cpp
  void choose_way(Addresses addresses, const Decision& decision);
  void use_stable_addresses(FaultAccess access);
  void expect(std::uint64_t budget_bytes, const Decision& decision);
  void* allocate_stable(std::size_t wanted_bytes);
  bool find_room_for_block(std::uint64_t bytes, std::uint64_t page_bytes);
  void note_made(Page& page, const Decision& decision);
  void* note_born(void* data, const Decision& decision);
  bool can_go_on(const Decision& decision) const;
  void goes_on(Frame& frame, const Decision& decision);
  void serve_faults(StableAddress& stable);
  void serve(StableAddress& stable, std::uint64_t address, FaultTrouble& trouble);
  void bring_in_touched(StableAddress& stable, const PagePtr& page);
  void note_touched(const PagePtr& page, const Decision& decision);
  void bring_in(Frame& frame, const OperatorCall& call, std::size_t first);
  bool bring_in(const Frame::Use& used);
  bool others_use(const Page& page) const;
  void refuse_or_allow(const Frame::Use& used, Refusals::Runner runner, const std::exception_ptr& failed);
  void bring_back();
  void keep_nothing();
  void plan(const std::optional<PlanWanted>& wanted);
  void move_ahead(std::size_t position);
  std::uint64_t alive_bytes(std::uint64_t bytes) const;
  std::uint64_t limit_bytes() const;
  std::uint64_t kept_bytes(std::uint64_t bytes) const;

  mutable std::mutex mutex_;
  std::atomic<Mode> mode_ = Mode::kAsleep;
  std::atomic<bool> listens_ = false;
  std::atomic<std::uint64_t> budget_bytes_ = kNoLimit;
  std::atomic<std::uint64_t> allowed_bytes_ = 0;    ///< beside the budget
  std::atomic<std::uint64_t> reserved_bytes_ = 0;   ///< promised to allocations under way
  std::atomic<std::uint64_t> seen_peak_bytes_ = 0;  ///< since start(), whatever has been reset since
  std::uint64_t minimum_bytes_ = 0;
  std::uint64_t clock_ = 0;
  const std::size_t slot_;  ///< the device's number
  std::unique_ptr<Memory> memory_;
  StepFollower step_;
  PageTable table_;
  PageMover mover_;
  NoAddress no_address_;
  /// For user-only and for full access. Never destroyed, because their threads serve faults.
  std::array<std::atomic<StableAddress*>, 2> staying_{};
  std::atomic<StableAddress*> stable_ = nullptr;  ///< that of new pages; nullptr: their addresses go
  FaultSupport faults_;                           ///< that the budget uses
  Refusals refusals_;
  c10::SmallVector<PagePtr, PageTable::kTogether + 1>
      touched_;  ///< the last few that were touched without an operator
  /// Whether an operator may use more than fits, whose pages come when it touches them.
  std::atomic<bool> uses_more_than_fits_ = false;
  std::atomic<bool> waits_while_full_ = false;
  std::atomic<std::uint64_t> expected_bytes_ = kNoLimit;  ///< what the budget is or will soon be
  BlockCache blocks_;
  Peaks peaks_;
  std::atomic<std::uint64_t> starts_ = 0;
  std::uint64_t evicted_before_step_ = 0;  ///< bytes evicted in all when the step under way began
  std::deque<std::uint32_t> fetches_;      ///< ids of pages whose planned fetches wait for room
};

}  // namespace reef
