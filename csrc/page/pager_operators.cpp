// The part of Pager for running operators: brings in and pins the pages they use, and follows the step.
#include <algorithm>
#include <functional>
#include <utility>

#include "page/pager.h"
#include "reef/error.h"

namespace reef {

// ---- operators with kernels of their own

void Pager::enter(const OperatorCall& call, Register what, c10::ArrayRef<Use> uses) {
  Frame& frame = this_threads_frame();
  const bool outermost = frame.depth++ == 0;
  if (outermost) {
    frame.failed = nullptr;
    frame.op = &(call.in_backward ? call.op.name_in_backward : call.op.name);
    frame.position = StepFollower::kUntraced;
    frame.knew = false;
    frame.oversized = false;
    frame.outermost_uses = 0;
  }
  if (mode_ == Mode::kAsleep || uses.empty()) return;
  try {
    enter_operator(frame, call, what, uses);
  } catch (...) {  // leave() lets go of what has been pinned; the next allocation tells
    mover_.keep_error(std::current_exception(), Decision(mutex_));
  }
}

void Pager::enter_operator(Frame& frame, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses) {
  const bool outermost = frame.depth == 1;
  const std::size_t first = frame.used.size();
  bool all_there = true;
  std::optional<PlanWanted> wanted;
  {
    Decision decision(mutex_);
    take_freed(decision);
    if (outermost) ++clock_;
    Known known;
    for (const Use& use : uses) {
      find(*use.storage, known.pages, decision);
      known.ends.push_back(known.pages.size());
      frame.knew |= use.parameter;
    }
    frame.knew |=
        std::any_of(known.pages.begin(), known.pages.end(), [](const Page* page) { return page->learned; });
    if (outermost && call.records_gradient && step_.awaits_step() &&
        step_.begins_step(call.op.name, learned_uses(uses, known))) {
      const std::uint64_t before = std::exchange(evicted_before_step_, mover_.evicted_bytes(decision));
      const bool replan = step_.end_step();
      for (const LearnedPagePtr& page : step_.learner().left_behind())
        table_.next_use_changed(static_cast<Page&>(*page));
      if (replan) fetches_.clear();
      // A step that evicted nothing needs no plan. A plan would be too pessimistic, because it adds the peak
      // of pinned memory and the peak of pages, which may have occurred at different times.
      if (replan && evicted_before_step_ != before)
        wanted = step_.wants_plan(budget_bytes_, mover_.speeds(decision));
    }
    // All pages are pinned before the first is brought in, because making room for one must not evict
    // another.
    begin_uses(frame, call, what, uses, known, decision);
    for (std::size_t i = first; i < frame.used.size(); ++i) {
      const Frame::Use& used = frame.used[i];
      all_there &= used.page->way->is_there(*used.page, used.writes) && used.page->refusals == 0;
      if (all_there && used.writes) used.page->written();
    }
    if (outermost && !frame.used.empty()) {
      frame.outermost_uses = frame.used.size();
      frame.position = step_.begin_operator(call.op.name, learned_uses(frame));
    }
    if (all_there) operator_runs(frame, decision);
  }
  plan(wanted);
  if (!all_there) bring_in(frame, call, first);
}

StepFollower::Uses Pager::learned_uses(c10::ArrayRef<Use> uses, const Known& known) {
  StepFollower::Uses used;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    for (Page* const page : known.of(i)) {
      if (page->learned) used.push_back({page, uses[i].writes});
    }
  }
  return used;
}

// Returns the pages of the outermost operator that the learner knows.
StepFollower::Uses Pager::learned_uses(const Frame& frame) {
  StepFollower::Uses used;
  for (std::size_t i = 0; i < frame.outermost_uses; ++i) {
    const Frame::Use& use = frame.used[i];
    if (use.page->learned) used.push_back({use.page.get(), use.writes});
  }
  return used;
}

// Pins the operator's pages and registers new ones; notes the storages that are no pages.
void Pager::begin_uses(Frame& frame, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses,
                       const Known& known, Decision& decision) {
  const std::uint64_t stream = memory_->stream();
  for (std::size_t i = 0; i < uses.size(); ++i) {
    const Use& use = uses[i];
    const bool may_register =
        running() && (what == Register::kAll || use.parameter || (frame.knew && use.writes));
    c10::ArrayRef<Page*> pages = known.of(i);
    Pages registered;
    if (pages.empty() && may_register)
      pages = registered = find_or_register(*use.storage, decision);  // The storage may occur twice.
    if (pages.empty()) {
      const void* const data = use.storage->_mutable_data_ptr_no_checks().get();
      if (data == nullptr || use.storage->nbytes() < Page::kLeastBytes) continue;
      frame.unknown.reserve(frame.unknown.size() + 1);
      table_.use_unknown(data);
      frame.unknown.push_back(data);
      continue;
    }
    if (use.writes && pages.front()->parameter && !call.in_backward && !call.records_gradient)
      step_.parameter_written();
    for (Page* const page : pages) {
      page->last_use = clock_;
      page->parameter |= use.parameter;
      if (use.writes) ++page->version;
      // A block belongs to the stream for which it was allocated. If another stream uses it, the allocator
      // could reuse it too early after an eviction.
      if (page->stream != stream) stay(*page);
      frame.used.push_back({PagePtr(page), use.writes, use.storage});
      table_.pin(*page);
    }
  }
}

// Pins everything that the frame uses once more, and returns the function that unpins it.
Pager::LetGo Pager::held_until_called(const Frame& frame) {
  for (const Frame::Use& use : frame.used) table_.pin(*use.page);
  for (const void* data : frame.unknown) table_.use_unknown(data);
  return [this, used = frame.used, unknown = frame.unknown] {
    const Decision later(mutex_);
    end_uses(used, unknown);
  };
}

void Pager::end_uses(c10::ArrayRef<Frame::Use> used, c10::ArrayRef<const void*> unknown) {
  for (const Frame::Use& use : used) table_.unpin(*use.page);
  for (const void* data : unknown) table_.unuse_unknown(data);
}

// Is called when the operator's pages are in memory.
void Pager::operator_runs(const Frame& frame, const Decision&) {
  if (frame.used.empty()) return;
  const std::uint64_t needed = needed_bytes(0);
  minimum_bytes_ = std::max(minimum_bytes_, needed);
  if (frame.depth == 1) step_.operator_runs(alive_bytes(0) - table_.learned_bytes(), needed);
}

void Pager::bring_in(Frame& frame, const OperatorCall& call, std::size_t first) {
  bool full = false;
  for (std::size_t i = first; i < frame.used.size(); ++i) {
    const Frame::Use& used = frame.used[i];
    std::exception_ptr failed;
    try {
      full = full || !bring_in(used);
    } catch (...) {
      failed = std::current_exception();
      if (!frame.failed) frame.failed = failed;
    }
    refuse_or_allow(used, {&frame, &call}, failed);
  }
  const Decision decision(mutex_);
  if (full) goes_on(frame, decision);
  operator_runs(frame, decision);
}

// Returns whether operators of other threads use the page and may be asking its storage for the memory.
// Called with the lock held.
bool Pager::others_use(const Page& page) const {
  const Frame& frame = this_threads_frame();
  const auto is_it = [&](const auto& use) { return use.page == &page; };
  const auto own = std::count_if(frame.used.begin(), frame.used.end(), is_it) +
                   std::count_if(frame.held.begin(), frame.held.end(), is_it);
  return page.pins > static_cast<std::uint32_t>(own) + page.holds;
}

// Brings a page in. Returns false if only other pages in use could make room for it; then the page comes when
// it is touched. This is possible only if addresses stay.
bool Pager::bring_in(const Frame::Use& used) {
  if (make_resident(used.page, used.owner, used.writes, MayLeave::kUnused)) return true;
  const Decision decision(mutex_);
  if (can_go_on(decision) || (most() == MayLeave::kUsed && others_use(*used.page))) return false;
  throw working_set_error(wanted_room(used.page->bytes, decision));
}

// If the page could not come, makes its storage throw the reason when it is asked for its memory.
void Pager::refuse_or_allow(const Frame::Use& used, Refusals::Runner runner,
                            const std::exception_ptr& failed) {
  std::string refusal;
  try {
    if (failed) std::rethrow_exception(failed);
  } catch (const std::exception& error) {
    refusal = message_of(error);
  }
  const Decision decision(mutex_);
  Page& page = *used.page;
  if (used.writes) page.written();
  if (!refusal.empty() && page.state == PageState::kAway) {
    // If addresses do not stay, the storage throws already, but with the message for a read without an
    // operator.
    const bool others_read = page.way->addresses_stay() && page.pins > 1;
    refusals_.refuse(page, *used.owner, runner, refusal, others_read);
  } else if (page.refusals > 0) {  // It is in memory, or comes when it is touched.
    refusals_.came(page, *used.owner, runner);
  }
}

void Pager::leave(const OperatorCall& call, Register what, c10::ArrayRef<Use> results, LetGo* then) noexcept {
  Frame& frame = this_threads_frame();
  const bool outermost = --frame.depth == 0;
  if (outermost) {
    // A library that gets no memory may try something that needs less (cuDNN: another algorithm), with
    // results that differ in the last bits.
    if (const auto refused = std::exchange(frame.refused, nullptr); refused && !results.empty())
      mover_.keep_error(std::make_exception_ptr(went_on_error(call.op.name, refused)), Decision(mutex_));
    frame.failed = nullptr;
    frame.op = nullptr;
  }
  if (frame.knew) what = Register::kAll;  // The results of an operator on pages become pages.
  if (frame.used.empty() && frame.unknown.empty() && (what == Register::kNone || results.empty())) return;
  {
    Decision decision(mutex_);
    take_freed(decision);
    if (!refusals_.empty()) refusals_.end({&frame, &call});
    c10::SmallVector<LearnedPage*, 4> made;
    for (const Use& use : running() ? results : c10::ArrayRef<Use>{}) {
      for (Page* const page :
           what == Register::kAll ? find_or_register(*use.storage, decision) : find(*use.storage, decision)) {
        if (!page->in_memory() && !page->way->addresses_stay()) continue;
        page->last_use = clock_;
        if (page->learned) made.push_back(page);
        if (!frame.keepers.empty()) {  // The caller of this operator may keep a raw pointer.
          table_.pin(*page);
          frame.held.push_back({frame.keepers.back(), PagePtr(page)});
        }
        if (outermost) continue;
        table_.pin(*page);  // An outer kernel may keep one, too.
        frame.used.push_back({PagePtr(page)});
      }
    }
    if (!outermost) {
      if (then != nullptr) *then = held_until_called(frame);
      return;
    }
    // The step is told of the end before the pages may leave.
    if (running() && (frame.position != StepFollower::kUntraced || !made.empty())) {
      if (frame.position == StepFollower::kUntraced) {
        frame.position = step_.begin_operator(call.op.name, {});
        step_.operator_runs(0, needed_bytes(0));
      }
      step_.end_operator(frame.position, learned_uses(frame), made, mover_.counts(decision).waited_seconds);
    }
    if (then != nullptr) *then = held_until_called(frame);
    end_uses(frame.used, frame.unknown);
    frame.used.clear();
    frame.unknown.clear();
    if (!running() || frame.position == StepFollower::kUntraced) return;
    if (!step_.learner().following()) fetches_.clear();
    if (step_.moves(frame.position).empty() && fetches_.empty() && mover_.leaving(decision) == nullptr)
      return;
  }
  move_ahead(frame.position);
}

// ---- callers of operators

void Pager::enter_around(const OperatorCall& call, bool keeps, c10::ArrayRef<Use> uses) {
  if (mode_ == Mode::kAsleep) return;
  try {
    enter_caller(call, keeps, uses);
  } catch (...) {  // leave_around() lets go of what has been pinned; the next allocation tells
    mover_.keep_error(std::current_exception(), Decision(mutex_));
  }
}

void Pager::enter_caller(const OperatorCall& call, bool keeps, c10::ArrayRef<Use> uses) {
  Frame& frame = this_threads_frame();
  c10::SmallVector<Frame::Use, 8> wanted;
  {
    Decision decision(mutex_);
    take_freed(decision);
    for (const Use& use : uses) {
      const Pages pages = find(*use.storage, decision);
      for (Page* const page : pages) {
        if (use.writes) ++page->version;
        frame.held.push_back({&call, PagePtr(page)});
        table_.pin(*page);
        if (!page->way->is_there(*page, use.writes))
          wanted.push_back({PagePtr(page), use.writes, use.storage});
        if (use.writes) page->written();
      }
      const void* const data = pages.empty() ? use.storage->_mutable_data_ptr_no_checks().get() : nullptr;
      if (data != nullptr) {
        frame.held.reserve(frame.held.size() + 1);
        table_.use_unknown(data);
        frame.held.push_back({&call, nullptr, data});
      }
    }
  }
  if (keeps) frame.keepers.push_back(&call);
  for (const Frame::Use& use : wanted) {
    std::exception_ptr failed;
    try {
      bring_in(use);
    } catch (const BudgetError&) {
      // An operator inside the call will get the same error; if addresses stay, the page comes when it is
      // touched.
      if (!use.page->way->addresses_stay()) failed = std::current_exception();
    } catch (...) {  // The next allocation, or the access, throws it.
      failed = std::current_exception();
      mover_.keep_error(failed, Decision(mutex_));
    }
    refuse_or_allow(use, {&frame, &call}, failed);
  }
}

void Pager::stay(Page& page) {
  if (!std::exchange(page.stays, true)) table_.pin(page);
}

void Pager::keep(c10::ArrayRef<Use> uses) {
  if (!running()) return;
  Decision decision(mutex_);
  for (const Use& use : uses) {
    for (Page* const page : find_or_register(*use.storage, decision)) {
      if (!page->way->addresses_stay()) stay(*page);
    }
  }
}

void Pager::leave_around(const OperatorCall& call) noexcept {
  Frame& frame = this_threads_frame();
  if (!frame.keepers.empty() && frame.keepers.back() == &call) frame.keepers.pop_back();
  if (std::none_of(frame.held.begin(), frame.held.end(),
                   [&](const auto& held) { return held.call == &call; }))
    return;
  const Decision decision(mutex_);
  if (!refusals_.empty()) refusals_.end({&frame, &call});
  std::erase_if(frame.held, [&](const Frame::Held& held) {
    if (held.call != &call) return false;
    held.page != nullptr ? table_.unpin(*held.page) : table_.unuse_unknown(held.unknown);
    return true;
  });
}

// ---- the plan

// Follows the plan as far as memory and the tiers allow. The next allocation throws what has failed.
void Pager::move_ahead(std::size_t position) {
  c10::SmallVector<PagePtr, 4> leave;
  c10::SmallVector<PagePtr, 4> come;
  mover_.settle_finished();
  {
    const Decision decision(mutex_);
    const auto page_of = [&](std::uint32_t id) { return static_cast<Page*>(step_.learner().page(id)); };
    for (const SwapMove& move : step_.moves(position)) {
      if (move.kind == SwapMove::Kind::kFetch) {
        fetches_.push_back(move.page);
      } else if (Page* page = page_of(move.page);
                 page != nullptr && PageTable::is_victim(*page) && page->state != PageState::kComing) {
        table_.begin_preparing(*page);
        leave.emplace_back(page);
      }
    }
    // Pages are fetched in the order in which they are needed. A page that is leaving occupies its room until
    // it has left.
    while (!fetches_.empty()) {
      Page* page = page_of(fetches_.front());
      if (page != nullptr && page->state == PageState::kAway) {
        if (!try_claim(page->bytes)) break;
        come.emplace_back(page);
      }
      fetches_.pop_front();
    }
  }
  for (const PagePtr& page : leave) {
    try {
      mover_.evict(page, PageMover::Way::kBeside);
    } catch (...) {
      mover_.keep_error(std::current_exception(), Decision(mutex_));
    }
  }
  for (const PagePtr& page : come) {
    c10::DataPtr block;
    try {
      block = page->way->allocate(*page);
    } catch (...) {
      mover_.keep_error(std::current_exception(), Decision(mutex_));
      reserved_bytes_ -= page->bytes;
      continue;
    }
    mover_.fetch(page, std::move(block), reserved_bytes_, PageMover::Way::kBeside);
  }
}

}  // namespace reef
