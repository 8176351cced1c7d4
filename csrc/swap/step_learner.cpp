#include "swap/step_learner.h"

#include <algorithm>
#include <utility>

namespace reef {
namespace {

// A program that never begins a step anew (inference) is not learnt, and must not fill memory.
constexpr std::size_t kLongestStep = std::size_t{1} << 20;
// So many candidates that are not the operator that began the last step: it will not come again.
constexpr std::size_t kMostCandidates = 16;

}  // namespace

// ---- steps

bool StepLearner::begins_step(const std::string& name, std::span<const Use> uses) {
  LearnedPage* first = nullptr;
  for (const Use& use : uses) {
    if (use.page->made_in_step == step_ && step_ > 1) continue;  // the batch, say
    first = use.page;
    break;
  }
  if (first_name_ != nullptr && (first_name_ != &name || first_page_ != first) &&
      ++other_candidates_ < kMostCandidates)
    return false;
  first_name_ = &name;
  first_page_ = first;
  other_candidates_ = 0;
  return true;
}

bool StepLearner::end_step() {
  if (position_ == 0) return false;
  if (following_ && position_ < operators_.size()) depart(position_);
  const bool repeated = following_;
  if (repeated) {
    departures_ = 0;
  } else {
    ++departures_;
    ++epoch_;
    spoiled_ ? forget_step() : learn();
  }
  left_behind_.clear();
  base_ += position_;
  for (Known& known : pages_) {
    if (!known.alive()) continue;
    if (!known.earlier) {  // made in the step and still alive: in the next, another takes its place
      known.page->id = LearnedPage::kNoId;
      known.page->next_use = kNeverUsed;
      if (repeated) left_behind_.push_back(known.page);
      known.page = nullptr;
    } else if (!repeated) {
      known.page->next_use = base_ + known.first;
    }
  }
  position_ = 0;
  cursor_ = 0;
  spoiled_ = false;
  ++step_;
  return !repeated && following_;
}

void StepLearner::forget_step() {
  for (Known& known : pages_) {
    if (known.alive()) known.page->id = LearnedPage::kNoId;
  }
  operators_.clear();
  accesses_.clear();
  pages_.clear();
  next_uses_.clear();
  trace_ = std::make_shared<const Trace>();
  following_ = false;
}

void StepLearner::reset() {
  forget_step();
  const std::uint64_t epoch = epoch_;
  *this = {};
  epoch_ = epoch + 1;
}

void StepLearner::died(LearnedPage& page) {
  page.dead = true;
  if (page.id == LearnedPage::kNoId) return;
  Known& known = pages_[std::exchange(page.id, LearnedPage::kNoId)];
  known.freed_after = position_ == 0 ? 0 : position_ - 1;
  known.page = nullptr;
}

// ---- operators

std::size_t StepLearner::begin_operator(const std::string& name, std::span<const Use> uses) {
  const std::size_t position = position_++;
  if (following_ && (position >= operators_.size() || operators_[position].name != &name)) depart(position);
  if (following_) {
    cursor_ = accesses_begin(position);
    const bool same =
        std::all_of(uses.begin(), uses.end(), [&](const Use& use) { return matches(*use.page, position); });
    if (!same) depart(position);
  }
  if (following_) return position;
  if (position >= kLongestStep) spoiled_ = true;
  if (spoiled_) return position;
  operators_.push_back({&name, accesses_.size(), 0, 0});
  for (const Use& use : uses) use.page->met_at = kNeverUsed;
  for (const Use& use : uses) record(*use.page, use.writes, position);
  return position;
}

void StepLearner::end_operator(std::size_t position, std::span<const Use> uses,
                               std::span<LearnedPage* const> results, double seconds,
                               std::uint64_t scratch_bytes) {
  if (position + 1 != position_) {  // another has begun meanwhile, on another thread
    if (following_) depart(position_);
    spoiled_ = true;
    return;
  }
  if (following_) {
    const bool same = std::all_of(results.begin(), results.end(),
                                  [&](LearnedPage* page) { return matches(*page, position); }) &&
                      cursor_ == operators_[position].accesses_end;
    if (same) {
      for (std::size_t i = accesses_begin(position); i < cursor_; ++i) {
        LearnedPage* const page = pages_[accesses_[i].page].page.get();
        if (page == nullptr) continue;
        page->next_use = next_uses_[i] == kNeverUsed ? kNeverUsed : base_ + next_uses_[i];
      }
      return;
    }
    depart_within(position, uses);
  }
  if (spoiled_) return;
  for (LearnedPage* page : results) record(*page, true, position);
  operators_[position].seconds = seconds;
  operators_[position].scratch_bytes = scratch_bytes;
}

// Whether the step that is followed meets this page here. Pages that existed before it and that it does not
// know are of no interest: what an earlier step left behind.
bool StepLearner::matches(LearnedPage& page, std::size_t position) {
  if (page.dead) return true;
  if (page.met_at == now(position)) return true;
  page.met_at = now(position);
  if (page.id == LearnedPage::kNoId && page.made_in_step != step_) return true;
  if (cursor_ >= operators_[position].accesses_end) return false;
  const std::uint32_t id = accesses_[cursor_].page;
  Known& known = pages_[id];
  if (page.id == LearnedPage::kNoId) {
    if (known.earlier || known.first != position || known.alive() || known.bytes != page.bytes) return false;
    known.page = &page;
    page.id = id;
  }
  if (page.id != id) return false;
  ++cursor_;
  return true;
}

void StepLearner::record(LearnedPage& page, bool writes, std::size_t position) {
  if (page.dead) return;
  if (page.met_at == now(position) && page.id != LearnedPage::kNoId) {
    for (std::size_t i = accesses_.size(); i-- > accesses_begin(position);) {
      if (accesses_[i].page == page.id) accesses_[i].writes |= writes;
    }
    return;
  }
  page.met_at = now(position);
  if (page.id == LearnedPage::kNoId) {
    const bool earlier = page.made_in_step != step_;
    page.id = static_cast<std::uint32_t>(pages_.size());
    pages_.push_back({&page, page.bytes, position, 0, earlier});
    writes = writes || !earlier;
  }
  accesses_.push_back({page.id, writes});
  operators_[position].accesses_end = accesses_.size();
}

// What the step did so far is what the followed one did up to `position`.
void StepLearner::depart(std::size_t position) {
  following_ = false;
  ++epoch_;
  if (position < operators_.size()) {
    accesses_.resize(accesses_begin(position));
    operators_.resize(position);
  }
  // Ids are given in the order in which pages are met.
  while (!pages_.empty() && pages_.back().first >= position) {
    if (pages_.back().alive()) {
      pages_.back().page->id = LearnedPage::kNoId;
      pages_.back().page->met_at = kNeverUsed;
    }
    pages_.pop_back();
  }
}

// What the operator began with is recorded once more.
void StepLearner::depart_within(std::size_t position, std::span<const Use> uses) {
  const std::string& name = *operators_[position].name;
  depart(position);
  position_ = position;
  begin_operator(name, uses);
}

// ---- learning

void StepLearner::learn() {
  drop_carried();
  build_trace();
  next_uses_.clear();
  for (const std::vector<std::uint64_t>& uses : next_uses(*trace_))
    next_uses_.insert(next_uses_.end(), uses.begin(), uses.end());
  following_ = true;
}

// Pages left behind by the step before, which died in this one, are not of this step's rhythm.
void StepLearner::drop_carried() {
  std::vector<std::uint32_t> renumbered(pages_.size(), LearnedPage::kNoId);
  std::size_t kept = 0;
  for (std::size_t id = 0; id < pages_.size(); ++id) {
    if (pages_[id].earlier && !pages_[id].alive()) continue;
    renumbered[id] = static_cast<std::uint32_t>(kept);
    pages_[kept] = pages_[id];
    if (pages_[kept].alive()) pages_[kept].page->id = renumbered[id];
    ++kept;
  }
  pages_.resize(kept);
  std::size_t end = 0;
  std::size_t from = 0;
  for (Operator& op : operators_) {
    for (; from < op.accesses_end; ++from) {
      const std::uint32_t id = renumbered[accesses_[from].page];
      if (id != LearnedPage::kNoId) accesses_[end++] = {id, accesses_[from].writes};
    }
    op.accesses_end = end;
  }
  accesses_.resize(end);
}

void StepLearner::build_trace() {
  Trace trace;
  for (const Known& known : pages_) trace.pages.push_back({known.bytes, known.earlier});
  for (std::size_t i = 0; i < operators_.size(); ++i) {
    const Operator& op = operators_[i];
    trace.operators.push_back({*op.name, op.seconds, op.scratch_bytes, {}, {}});
    trace.operators.back().accesses.assign(accesses_.begin() + static_cast<std::ptrdiff_t>(accesses_begin(i)),
                                           accesses_.begin() + static_cast<std::ptrdiff_t>(op.accesses_end));
  }
  for (std::uint32_t id = 0; id < pages_.size(); ++id) {
    const Known& known = pages_[id];
    if (known.earlier) continue;
    const std::size_t last = operators_.size() - 1;
    trace.operators[known.alive() ? last : std::min(known.freed_after, last)].frees.push_back(id);
  }
  trace_ = std::make_shared<const Trace>(std::move(trace));
}

}  // namespace reef
