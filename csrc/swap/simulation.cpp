#include "swap/simulation.h"

#include <algorithm>
#include <string>

#include "reef/bytes.h"
#include "reef/error.h"

namespace reef {

void check_feasible(const Trace& trace, std::uint64_t budget_bytes) {
  check(trace);
  for (std::size_t op = 0; op < trace.operators.size(); ++op) {
    const std::uint64_t needed = working_set_bytes(trace, op);
    if (needed <= budget_bytes) continue;
    throw ConfigError("a budget of " + std::to_string(budget_bytes) + " bytes is too small: operator " +
                      std::to_string(op) + " (" + trace.operators[op].name + ") works on " +
                      std::to_string(needed) + " bytes at once; give at least " +
                      std::to_string(minimum_bytes(trace)));
  }
}

Simulation::Simulation(const Trace& trace, std::uint64_t budget_bytes, const SwapSpeeds& speeds)
    : trace_(trace), budget_bytes_(budget_bytes), speeds_(speeds), pages_(trace.pages.size()) {
  check_feasible(trace, budget_bytes);
  next_uses_ = next_uses(trace);
  // Pages that persist begin outside: a budget may be too small for all of them.
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (trace.pages[page].persistent) pages_[page].where = Where::kAway;
  }
}

SwapCost Simulation::step(const SwapPlan& plan) {
  cost_ = {};
  events_.clear();
  rank_by(plan.demand);
  load_.assign(trace_.operators.size(), 0);
  const double began = now_;
  for (std::size_t op = 0; op < trace_.operators.size(); ++op) run(op, plan);
  cost_.seconds = now_ - began;
  return cost_;
}

void Simulation::run(std::size_t op, const SwapPlan& plan) {
  const TraceOperator& what = trace_.operators[op];
  settle();
  for (const TraceAccess& access : what.accesses) pages_[access.page].pinned_by = clock_;
  for (const TraceAccess& access : what.accesses) bring(op, access.page);
  make_room(op, what.scratch_bytes);
  load_[op] = resident_bytes_ + what.scratch_bytes;
  cost_.peak_bytes = std::max(cost_.peak_bytes, load_[op]);
  now_ += what.seconds;

  const std::uint64_t step_start = clock_ - op;
  for (std::size_t i = 0; i < what.accesses.size(); ++i) {
    Page& page = pages_[what.accesses[i].page];
    page.last_use = clock_;
    const std::uint64_t next = next_uses_[op][i];
    page.next_use = next == kNeverUsed ? kNeverUsed : step_start + next;
    if (what.accesses[i].writes) page.clean = false;
    may_leave(what.accesses[i].page);
  }
  for (const std::uint32_t freed : what.frees) {
    if (pages_[freed].where != Where::kAway) resident_bytes_ -= bytes_of(freed);
    pages_[freed] = {.stamp = pages_[freed].stamp + 1};
  }
  ++clock_;
  if (op < plan.after.size()) {
    settle();
    for (const SwapMove& move : plan.after[op]) start(move);
  }
}

// Transfers that have ended by now.
void Simulation::settle() {
  for (; !coming_.empty(); coming_.pop_front()) {
    if (!is_under_way(coming_.front(), Where::kComing)) continue;
    if (coming_.front().ready > now_) break;
    pages_[coming_.front().page].where = Where::kResident;
  }
  for (; !leaving_.empty(); leaving_.pop_front()) {
    if (!is_under_way(leaving_.front(), Where::kLeaving)) continue;
    if (leaving_.front().ready > now_) break;
    pages_[leaving_.front().page].where = Where::kAway;
    resident_bytes_ -= bytes_of(leaving_.front().page);
  }
}

void Simulation::wait_until(double time) {
  if (time > now_) {
    cost_.stalled_seconds += time - now_;
    now_ = time;
  }
  settle();
}

void Simulation::bring(std::size_t op, std::uint32_t page) {
  Page& state = pages_[page];
  switch (state.where) {
    case Where::kResident:
      return;
    case Where::kLeaving:  // the memory is still there, and so, by now, is the copy
      state.where = Where::kResident;
      state.clean = true;
      return;
    case Where::kComing:
      wait_until(state.ready);
      return;
    case Where::kNowhere:
      make_room(op, bytes_of(page));
      state.where = Where::kResident;
      state.clean = false;
      resident_bytes_ += bytes_of(page);
      return;
    case Where::kAway:
      make_room(op, bytes_of(page));
      events_.push_back({op, page, state.last_use, true});
      ++cost_.faults;
      start_coming(page);
      wait_until(state.ready);
      return;
  }
}

void Simulation::make_room(std::size_t op, std::uint64_t bytes) {
  while (resident_bytes_ + bytes > budget_bytes_) {
    if (finish_one_leaving()) continue;
    const std::uint32_t page = victim();
    events_.push_back({op, page, pages_[page].last_use, false});
    start_leaving(page);
  }
}

bool Simulation::finish_one_leaving() {
  while (!leaving_.empty() && !is_under_way(leaving_.front(), Where::kLeaving)) leaving_.pop_front();
  if (leaving_.empty()) return false;
  wait_until(leaving_.front().ready);
  return true;
}

// Between equals the larger leaves, and then the one met first.
bool Simulation::Candidate::operator<(const Candidate& other) const {
  if (last != other.last) return last < other.last;
  if (bytes != other.bytes) return bytes < other.bytes;
  return page > other.page;
}

void Simulation::may_leave(std::uint32_t page) {
  Page& state = pages_[page];
  ++state.stamp;
  if (!is_there(state)) return;
  const std::uint64_t last = demand_ == Demand::kRecency ? ~(state.last_use + 1) : state.next_use;
  candidates_.push_back({last, bytes_of(page), page, state.stamp});
  std::push_heap(candidates_.begin(), candidates_.end());
}

void Simulation::rank_by(Demand demand) {
  demand_ = demand;
  candidates_.clear();
  for (std::uint32_t page = 0; page < pages_.size(); ++page) may_leave(page);
}

// Feasibility was checked, so among what the running operator does not use there is always one; what it uses
// becomes a candidate again when it has run. A page on its way in counts as in memory.
std::uint32_t Simulation::victim() {
  for (;;) {
    const Candidate best = candidates_.front();
    std::pop_heap(candidates_.begin(), candidates_.end());
    candidates_.pop_back();
    const Page& state = pages_[best.page];
    if (state.stamp == best.stamp && state.pinned_by != clock_) return best.page;
  }
}

void Simulation::start_leaving(std::uint32_t page) {
  Page& state = pages_[page];
  ++state.stamp;
  ++cost_.evictions;
  if (state.clean || state.where == Where::kComing) {
    state.where = Where::kAway;
    resident_bytes_ -= bytes_of(page);
    return;
  }
  const double bytes = static_cast<double>(bytes_of(page));
  out_lane_free_ = std::max(now_, out_lane_free_) + bytes / speeds_.out_bytes_per_second;
  state.where = Where::kLeaving;
  state.ready = out_lane_free_;
  state.clean = true;
  leaving_.push_back({page, state.ready});
  cost_.bytes_out += bytes_of(page);
  settle();
}

void Simulation::start_coming(std::uint32_t page) {
  Page& state = pages_[page];
  const double bytes = static_cast<double>(bytes_of(page));
  in_lane_free_ = std::max(now_, in_lane_free_) + bytes / speeds_.in_bytes_per_second;
  state.where = Where::kComing;
  state.ready = in_lane_free_;
  state.clean = true;
  coming_.push_back({page, state.ready});
  may_leave(page);
  resident_bytes_ += bytes_of(page);
  cost_.bytes_in += bytes_of(page);
  cost_.peak_bytes = std::max(cost_.peak_bytes, resident_bytes_);
}

void Simulation::start(const SwapMove& move) {
  const Where where = pages_[move.page].where;
  if (move.kind == SwapMove::Kind::kEvict) {
    if (where == Where::kResident) start_leaving(move.page);
    return;
  }
  if (where != Where::kAway || resident_bytes_ + bytes_of(move.page) > budget_bytes_) return;
  ++cost_.fetches;
  start_coming(move.page);
}

SwapCost simulate(const Trace& trace, const SwapPlan& plan, std::uint64_t budget_bytes,
                  const SwapSpeeds& speeds) {
  Simulation simulation(trace, budget_bytes, speeds);
  simulation.step(plan);
  return simulation.step(plan);
}

}  // namespace reef
