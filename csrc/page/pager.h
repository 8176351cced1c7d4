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
  std::uint64_t expected_bytes = 0;  ///< what it will soon be, if another: how large pages are depends on it
  std::vector<std::shared_ptr<Tier>> tiers;
  bool prefetch = true;  ///< move pages beside the operators, once a step is known
  Addresses addresses = Addresses::kAutomatic;
  /// Where addresses stay: refuse a working set that exceeds the budget, instead of moving pages while it is
  /// worked on. Where they do not there is no choice.
  bool strict = false;
  /// Where addresses stay: whoever touches what is away without an operator waits while no tier has room.
  bool wait_while_full = false;
};

struct FaultTrouble;

/// Keeps what LibTorch's allocator has handed out of one memory within a budget, by moving pages to tiers and
/// back. One for each device, asleep until start(); never destroyed, since memory is freed until the very
/// end. It decides: the table keeps the pages, the mover moves them, the follower knows what comes next.
///
/// Its lock covers decisions only (decision.h). A thread that needs room or a page does the work for it by
/// itself, and waits for others' input and output at most.
class Pager final : public AllocationGate, private AtFork {
 public:
  /// Throws ConfigError where there is no such device.
  static Pager& of(c10::Device device);
  static Pager& cpu();
  /// Of a device that has a budget now, or nullptr; of any kind of device.
  static Pager* running(c10::Device device);
  c10::Device device() const { return memory_->device(); }

  // ---- pager.cpp

  /// Gives the budget's number, which says later whether it is still the one in force. Throws ConfigError if
  /// another is.
  std::uint64_t start(PagerOptions options);
  /// Every page comes back. Throws what the last failing read threw, after trying them all; then it goes on
  /// running, with no limit, and may be stopped again. Without effect if another budget has come since.
  void stop(std::uint64_t number);
  /// Stops at once. Pages that are away stay so, and an access to one throws.
  void abandon(std::uint64_t number) noexcept;
  bool running() const { return mode_ == Mode::kRunning; }
  /// Whether it hears of frees: it runs, or has pages still.
  bool listens() const { return listens_; }
  /// Throws ConfigError unless that budget is in force: in a forked child it is over.
  void check_in_force(std::uint64_t number) const;

  std::uint64_t budget_bytes() const;
  /// Evicts until it holds; throws BudgetError, and changes nothing, if it cannot. If it is more than before,
  /// pages come back as far as there is room; throws what a tier throws.
  void set_budget_bytes(std::uint64_t bytes);
  /// On top of the budget, until it is taken back; what exceeds the budget leaves then.
  void allow(std::uint64_t bytes);
  void disallow(std::uint64_t bytes) noexcept;

  /// `tensor`'s storage becomes a page, if it can be one, that the program knows by this name.
  void adopt(const at::Tensor& tensor, const std::string& name = {});
  /// While pinned, a page stays in memory, over the end of a budget and into the next. Brings it in first.
  void pin(const at::Tensor& tensor);
  void unpin(const at::Tensor& tensor) noexcept;
  /// Bytes of `tensor`'s page, if it is one that could leave; else 0.
  std::uint64_t evictable_bytes(const at::Tensor& tensor);

  PagerCounts counts() const;
  void reset_counts();
  /// The step that is or was followed last; empty if none was.
  Trace trace() const;
  /// Alive beside its pages, at most.
  std::uint64_t fixed_bytes() const;
  SwapSpeeds speeds() const;
  std::vector<std::shared_ptr<Tier>> tiers() const;
  const Memory& memory() const { return *memory_; }

  /// Is kept up to date until it is removed. It must not move.
  void add(PeakMark& mark);
  void remove(PeakMark& mark);
  /// It is now.
  void set(PeakMark& mark);
  /// Bytes of the budget that were free when most was alive, since then; negative: of the pages that have
  /// left since. 0 if there was another budget then. Nothing: there is none now.
  std::optional<std::int64_t> left_bytes(const PeakMark& mark);
  /// The most that was alive since start() or reset_peak().
  std::uint64_t peak_bytes();
  void reset_peak();

  // ---- pager_operators.cpp

  struct Use {
    c10::StorageImpl* storage;
    bool writes;
    bool parameter;  ///< a leaf that requires a gradient
  };
  /// Which storages, beside parameters and what a known page's operator writes or makes, become pages.
  enum class Register : std::uint8_t { kNone, kAll };
  /// An operator with a kernel of its own starts: its pages are brought in and pinned. What fails is kept,
  /// and thrown by this thread's next allocation within the operator; until then the storage throws when
  /// accessed.
  void enter(const OperatorCall& call, Register what, c10::ArrayRef<Use> uses);
  /// It ends, with these new storages. With `then`, its pages stay pinned until that is called.
  using LetGo = std::function<void()>;
  void leave(const OperatorCall& call, Register what, c10::ArrayRef<Use> results,
             LetGo* then = nullptr) noexcept;
  /// Something that calls operators starts: what it was given is brought in, and pinned until it ends, and
  /// with `keeps` what is made within it, too, since it may keep raw pointers.
  void enter_around(const OperatorCall& call, bool keeps, c10::ArrayRef<Use> uses);
  void leave_around(const OperatorCall& call) noexcept;

  /// These storages keep their addresses until they are freed, if need be by staying in memory.
  void keep(c10::ArrayRef<Use> uses);

  // ---- pager_room.cpp

  Frame& this_threads_frame() const { return Frame::of_this_thread(slot_); }

  /// Memory has run out: what can leave does, until so many bytes are free. False if nothing did, or if
  /// another thread is at work with the pages.
  bool free_some(std::uint64_t bytes) noexcept;
  /// The error for an allocation of `bytes` that found no room.
  void refuse_allocation(std::uint64_t bytes);

  /// Whether what is away keeps its address; while a budget is in force, its way, and else the next one's.
  bool addresses_stay() const { return stable_ != nullptr; }
  /// "stay", or why they do not, or not for system calls.
  std::string addresses() const;

  // AllocationGate
  bool before_allocate(std::size_t bytes) override;
  void after_allocate(std::size_t bytes) noexcept override;
  void* allocate(std::size_t bytes) override;
  bool freed(const void* data) noexcept override;
  bool counts_itself(const void* data) const noexcept override { return stable_of(data) != nullptr; }
  bool take_back(void* data) noexcept override;

  /// The storage of an evicted page is gone.
  void storage_died(Page& page) noexcept;

 private:
  enum class Mode : std::uint8_t {
    kAsleep,
    kRunning,
    kForked,  ///< in a child of a process with a budget: pages come back when wanted, and nothing leaves
  };
  static constexpr std::uint64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

  explicit Pager(std::unique_ptr<Memory> memory);
  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

  // With the lock.
  using Pages = c10::SmallVector<Page*, 4>;
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
  using Known = c10::SmallVector<Pages, 8>;
  void begin_uses(Frame& frame, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses,
                  Known& known, Decision& decision);
  static StepFollower::Uses learned_uses(const Frame& frame);
  LetGo held_until_called(const Frame& frame);
  void end_uses(c10::ArrayRef<Frame::Use> used, c10::ArrayRef<const void*> unknown);
  RoomWanted wanted_room(std::uint64_t bytes, const Decision&) const;

  // Without.
  /// What may leave for room: pages that nobody uses, or, where addresses stay, also those that are in use.
  /// kForTouched: for a page that was touched without an operator; as kUsed, but those touched last stay.
  enum class MayLeave : std::uint8_t { kUnused, kUsed, kForTouched };
  bool find_room(std::uint64_t bytes, MayLeave which);
  void make_room(std::uint64_t bytes);
  void make_room_ahead(const Frame& frame);
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
  /// Whose address it is, or nullptr.
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
  void bring_in(Frame& frame, std::size_t first);
  bool bring_in(const Frame::Use& used);
  void refuse_or_allow(const Frame::Use& used, const std::exception_ptr& failed);
  void bring_back();
  void keep_nothing();
  void allow_refused(const Decision& decision);
  void plan(const std::optional<PlanWanted>& wanted);
  void move_ahead(std::size_t position);
  std::uint64_t alive_bytes(std::uint64_t bytes) const;
  std::uint64_t limit_bytes() const;
  std::uint64_t kept_bytes(std::uint64_t bytes) const;

  mutable std::mutex mutex_;
  std::atomic<Mode> mode_ = Mode::kAsleep;
  std::atomic<bool> listens_ = false;
  std::atomic<std::uint64_t> budget_bytes_ = kNoLimit;
  std::atomic<std::uint64_t> allowed_bytes_ = 0;    ///< beside it
  std::atomic<std::uint64_t> reserved_bytes_ = 0;   ///< promised to allocations under way
  std::atomic<std::uint64_t> seen_peak_bytes_ = 0;  ///< since start(), whoever has reset what since
  std::uint64_t minimum_bytes_ = 0;
  std::uint64_t clock_ = 0;
  const std::size_t slot_;  ///< the device's number
  std::unique_ptr<Memory> memory_;
  StepFollower step_;
  PageTable table_;
  PageMover mover_;
  NoAddress no_address_;
  std::array<std::atomic<StableAddress*>, 2> staying_{};  ///< by access; never destroyed: they serve faults
  std::atomic<StableAddress*> stable_ = nullptr;          ///< that of the budget in force, if it has one
  FaultSupport faults_;                                   ///< as far as it is used
  /// Storages that were refused because a page of theirs could not come, where addresses stay.
  std::vector<std::pair<PagePtr, c10::weak_intrusive_ptr<c10::StorageImpl>>> refused_;
  c10::SmallVector<PagePtr, PageTable::kTogether + 1> touched_;  ///< without an operator, the last few
  std::atomic<bool> uses_more_than_fits_ = false;  ///< an operator may: its pages come when it touches them
  std::atomic<bool> waits_while_full_ = false;
  std::atomic<std::uint64_t> expected_bytes_ = kNoLimit;  ///< of the budget
  BlockCache blocks_;
  Peaks peaks_;
  std::atomic<std::uint64_t> starts_ = 0;
  std::uint64_t evicted_before_step_ = 0;  ///< bytes, in all, when the step under way began
  std::deque<std::uint32_t> fetches_;      ///< planned, by page id, and waiting for room
};

}  // namespace reef
