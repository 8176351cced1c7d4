#include "page/step_follower.h"

#include <algorithm>

#include "reef/error.h"

namespace reef {
namespace {

// After this many departures from the expected step, plans are made only once a step has repeated.
constexpr std::size_t kMostDepartures = 3;

}  // namespace

void StepFollower::begin(bool prefetch) {
  learner_.reset();
  plan_ = {};
  prefetch_ = prefetch;
  parameter_written_ = false;
  fixed_bytes_ = fixed_most_ = least_bytes_ = 0;
  last_end_ = Clock::now();
  waited_before_ = 0;
}

bool StepFollower::begins_step(const std::string& op, const Uses& known) {
  return parameter_written_ && !known.empty() && learner_.begins_step(op, {known.data(), known.size()});
}

bool StepFollower::end_step() {
  parameter_written_ = false;
  const bool repeated = learner_.following();
  const bool learnt = learner_.end_step();
  fixed_bytes_ = std::exchange(fixed_most_, 0);
  if (learnt) plan_ = {};
  if (learnt) least_bytes_ = minimum_bytes(learner_.trace()) + fixed_bytes_;
  if (!learner_.following()) return false;
  return learnt ? learner_.departures() < kMostDepartures : repeated && plan_.after.empty();
}

std::optional<PlanWanted> StepFollower::wants_plan(std::uint64_t budget_bytes, const SwapSpeeds& speeds) {
  plan_ = {Demand::kFarthest, {}};
  if (!prefetch_ || !learner_.following()) return std::nullopt;
  return PlanWanted{learner_.shared_trace(), budget_bytes - std::min(budget_bytes, fixed_bytes_), speeds};
}

SwapPlan make_plan(const PlanWanted& wanted) {
  const Trace& trace = *wanted.trace;
  // A plan is impossible if the step needs more than the budget, and unnecessary if all of it fits. In both
  // cases pages are only moved on demand.
  if (wanted.available_bytes < minimum_bytes(trace) || natural_peak_bytes(trace) <= wanted.available_bytes)
    return {Demand::kFarthest, {}};
  return plan_swaps(trace, wanted.available_bytes, SwapPolicy::kFarthest, wanted.speeds);
}

void StepFollower::use_plan(SwapPlan plan, const PlanWanted& wanted) {
  if (learner_.following() && learner_.shared_trace() == wanted.trace) plan_ = std::move(plan);
}

std::size_t StepFollower::begin_operator(const std::string& op, const Uses& uses) {
  return learner_.begin_operator(op, {uses.data(), uses.size()});
}

void StepFollower::operator_runs(std::uint64_t fixed_bytes, std::uint64_t needed_bytes) {
  fixed_most_ = std::max(fixed_most_, fixed_bytes);
  needed_before_ = needed_most_ = needed_bytes;
}

void StepFollower::end_operator(std::size_t position, const Uses& uses, c10::ArrayRef<LearnedPage*> results,
                                double waited_seconds) {
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_end_).count();
  const double waited = std::max(0.0, waited_seconds - waited_before_);
  last_end_ = now;
  waited_before_ = waited_seconds;
  std::uint64_t scratch = needed_most_ - needed_before_;
  for (const LearnedPage* page : results) scratch -= std::min(scratch, page->bytes);
  learner_.end_operator(position, {uses.data(), uses.size()}, {results.data(), results.size()},
                        std::max(0.0, seconds - waited), scratch);
}

c10::ArrayRef<SwapMove> StepFollower::moves(std::size_t position) const {
  if (!learner_.following() || position >= plan_.after.size()) return {};
  return plan_.after[position];
}

}  // namespace reef
