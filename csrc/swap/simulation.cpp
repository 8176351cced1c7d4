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
  for (const TraceAccess& access : what.accesses) bring(op, access.page, plan.demand);
  make_room(op, what.scratch_bytes, plan.demand);
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
  }
  for (const std::uint32_t freed : what.frees) {
    if (pages_[freed].where != Where::kAway) resident_bytes_ -= bytes_of(freed);
    pages_[freed] = {};
  }
  ++clock_;
  if (op < plan.after.size()) {
    settle();
    for (const SwapMove& move : plan.after[op]) start(move);
  }
}

// Transfers that have ended by now.
void Simulation::settle() {
  for (std::uint32_t page = 0; page < pages_.size(); ++page) {
    Page& state = pages_[page];
    if (state.ready > now_) continue;
    if (state.where == Where::kComing) state.where = Where::kResident;
    if (state.where == Where::kLeaving) {
      state.where = Where::kAway;
      resident_bytes_ -= bytes_of(page);
    }
  }
}

void Simulation::wait_until(double time) {
  if (time > now_) {
    cost_.stalled_seconds += time - now_;
    now_ = time;
  }
  settle();
}

void Simulation::bring(std::size_t op, std::uint32_t page, Demand demand) {
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
      make_room(op, bytes_of(page), demand);
      state.where = Where::kResident;
      state.clean = false;
      resident_bytes_ += bytes_of(page);
      return;
    case Where::kAway:
      make_room(op, bytes_of(page), demand);
      events_.push_back({op, page, state.last_use, true});
      ++cost_.faults;
      start_coming(page);
      wait_until(state.ready);
      return;
  }
}

void Simulation::make_room(std::size_t op, std::uint64_t bytes, Demand demand) {
  while (resident_bytes_ + bytes > budget_bytes_) {
    if (finish_one_leaving()) continue;
    const std::uint32_t page = victim(demand);
    events_.push_back({op, page, pages_[page].last_use, false});
    start_leaving(page);
  }
}

bool Simulation::finish_one_leaving() {
  const Page* first = nullptr;
  for (const Page& page : pages_) {
    if (page.where == Where::kLeaving && (first == nullptr || page.ready < first->ready)) first = &page;
  }
  if (first != nullptr) wait_until(first->ready);
  return first != nullptr;
}

// Feasibility was checked, so among what the running operator does not use there is always one. Between
// equals, the larger leaves; a page on its way in counts as in memory.
std::uint32_t Simulation::victim(Demand demand) const {
  std::uint32_t best = 0;
  bool found = false;
  const auto before = [&](const Page& a, const Page& b) {
    return demand == Demand::kRecency ? a.last_use + 1 < b.last_use + 1 : a.next_use > b.next_use;
  };
  for (std::uint32_t page = 0; page < pages_.size(); ++page) {
    const Page& state = pages_[page];
    const bool there = state.where == Where::kResident || state.where == Where::kComing;
    if (!there || state.pinned_by == clock_) continue;
    if (found && before(pages_[best], state)) continue;
    if (found && !before(state, pages_[best]) && bytes_of(page) <= bytes_of(best)) continue;
    best = page;
    found = true;
  }
  return best;
}

void Simulation::start_leaving(std::uint32_t page) {
  Page& state = pages_[page];
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
