#include <algorithm>
#include <utility>

#include "page/pager.h"
#include "page/pager_entry.h"
#include "page/storage_access.h"
#include "reef/error.h"

namespace reef {

void Pager::Frame::enter(Pager& pager, const OperatorCall& call, Register what, c10::ArrayRef<Use> uses) {
  const bool outermost = depth_++ == 0;
  if (outermost) {
    failed_ = nullptr;
    op_ = &(call.in_backward ? call.op.name_in_backward : call.op.name);
    position_ = StepFollower::kUntraced;
    knew_ = false;
  }
  if (!pager.running_ || uses.empty()) return;
  const Entry entry(pager);
  pager.take_freed();
  if (outermost) ++pager.clock_;
  StepFollower::Uses known;
  for (const Use& use : uses) {
    if (Page* page = pager.table_.find(*use.storage)) known.push_back({page, use.writes});
  }
  const bool parameters = std::any_of(uses.begin(), uses.end(), [](const Use& use) { return use.parameter; });
  if (what != Register::kAll && known.empty() && !parameters) return;
  knew_ |= !known.empty() || parameters;
  if (outermost && call.records_gradient && pager.step_.begins_step(call.op.name, known)) pager.end_step();

  // All are pinned before the first is faulted in: making room for one must not push out another.
  const std::uint64_t stream = pager.memory_->stream();
  const std::size_t first = pinned_.size();
  StepFollower::Uses used;
  for (const Use& use : uses) {
    const bool may_register = what == Register::kAll || use.parameter ||
                              (what == Register::kWrittenWithAKnown && knew_ && use.writes);
    Page* page = may_register ? pager.find_or_register(*use.storage) : pager.table_.find(*use.storage);
    if (page == nullptr) continue;
    page->last_use = pager.clock_;
    page->parameter |= use.parameter;
    if (use.writes && page->parameter && !call.in_backward && !call.records_gradient)
      pager.step_.parameter_written();
    pager.check_stream(*page, stream);
    pager.table_.pin(*page);
    pinned_.push_back(page);
    used.push_back({page, use.writes});
  }
  if (used.empty()) return;
  if (outermost) position_ = pager.step_.begin_operator(call.op.name, used);
  bring_in(pager, first, used);
  if (outermost && !pager.memory_->asks_before_allocations()) pager.make_room_ahead(position_, used);
  const std::uint64_t needed = pager.needed_bytes(0);
  pager.minimum_bytes_ = std::max(pager.minimum_bytes_, needed);
  if (outermost) pager.step_.operator_runs(pager.alive_bytes(0) - pager.table_.memory_bytes(), needed);
}

void Pager::Frame::bring_in(Pager& pager, std::size_t first, const StepFollower::Uses& used) {
  for (std::size_t i = 0; i < used.size(); ++i) {
    Page& page = *pinned_[first + i];
    try {
      pager.make_resident(page);
    } catch (const std::exception& error) {
      if (!failed_) failed_ = std::current_exception();
      if (const auto storage = page.storage.lock()) refuse_access(*storage, message_of(error));
    }
    if (used[i].writes && page.state == PageState::kClean) page.state = PageState::kResident;
  }
}

void Pager::Frame::leave(Pager& pager, const OperatorCall& call, Register what,
                         c10::ArrayRef<Use> results) noexcept {
  const bool outermost = --depth_ == 0;
  if (outermost) {
    failed_ = nullptr;
    op_ = nullptr;
  }
  if (knew_ && call.op.makes_alike) what = Register::kAll;
  if (pinned_.empty() && (what != Register::kAll || results.empty())) return;
  const Entry entry(pager);
  pager.take_freed();
  c10::SmallVector<LearnedPage*, 4> made;
  for (const Use& use : pager.running_ ? results : c10::ArrayRef<Use>{}) {
    Page* page =
        what == Register::kAll ? pager.find_or_register(*use.storage) : pager.table_.find(*use.storage);
    if (page == nullptr || !page->in_memory()) continue;
    page->last_use = pager.clock_;
    made.push_back(page);
    if (outermost) continue;
    pager.table_.pin(*page);  // an outer kernel may hold a raw pointer to it
    pinned_.push_back(page);
  }
  if (!outermost) return;
  for (Page* page : pinned_) pager.table_.unpin(*page);
  pinned_.clear();
  if (!pager.running_) return;
  if (position_ == StepFollower::kUntraced) {
    if (made.empty()) return;
    position_ = pager.step_.begin_operator(call.op.name, {});
    pager.step_.operator_runs(0, pager.needed_bytes(0));
  }
  pager.step_.end_operator(position_, made, pager.mover_.counts().waited_seconds);
  pager.move_ahead(position_);
}

void Pager::end_step() {
  const std::uint64_t before = std::exchange(evicted_before_step_, mover_.evicted_bytes());
  if (!step_.end_step()) return;
  fetches_.clear();
  // A plan adds up what was never alive together (pinned memory at its most, and pages at theirs); a step
  // that evicted nothing needs none.
  if (evicted_before_step_ == before) return;
  step_.make_plan(budget_bytes_, mover_.speeds());
}

// The plan is followed as far as memory and the tiers allow; what fails is told at the next allocation.
void Pager::move_ahead(std::size_t position) {
  const auto page_of = [&](std::uint32_t id) { return static_cast<Page*>(step_.learner().page(id)); };
  const c10::ArrayRef<SwapMove> moves = step_.moves(position);
  if (!step_.learner().following()) fetches_.clear();
  if (moves.empty() && fetches_.empty()) return;
  mover_.settle();
  try {
    for (const SwapMove& move : moves) {
      Page* page = page_of(move.page);
      if (page == nullptr) continue;
      if (move.kind == SwapMove::Kind::kFetch) {
        fetches_.push_back(move.page);
      } else {
        mover_.start_evict(*page);
      }
    }
    // In the order in which they are needed; what is still leaving has its room until it is gone.
    while (!fetches_.empty()) {
      Page* page = page_of(fetches_.front());
      if (page != nullptr && page->state == PageState::kAway) {
        if (alive_bytes(page->bytes) > budget_bytes_) break;
        mover_.start_fetch(*page);
      }
      fetches_.pop_front();
    }
  } catch (...) {
    mover_.keep_error(std::current_exception());
  }
}

}  // namespace reef
