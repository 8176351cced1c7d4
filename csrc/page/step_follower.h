#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "page/page.h"
#include "reef/swap.h"
#include "swap/step_learner.h"

namespace reef {

/// The inputs of a plan for a step that repeats.
struct PlanWanted {
  std::shared_ptr<const Trace> trace;
  std::uint64_t available_bytes = 0;  ///< for the pages of the step
  SwapSpeeds speeds;
};
/// Makes a plan. This costs as much as a few simulated steps.
SwapPlan make_plan(const PlanWanted& wanted);

/// Follows the training program through its steps: detects where they begin, measures operators for the
/// learner, and holds the plan of the step that repeats. Not thread-safe.
class StepFollower {
 public:
  static constexpr std::size_t kUntraced = std::numeric_limits<std::size_t>::max();
  using Uses = c10::SmallVector<StepLearner::Use, 8>;

  StepLearner& learner() { return learner_; }
  const StepLearner& learner() const { return learner_; }
  const SwapPlan& plan() const { return plan_; }

  /// Begins a budget. With `prefetch`, pages move ahead of the operators; otherwise only the order of
  /// eviction is planned.
  void begin(bool prefetch);

  /// Notes that an optimizer has written a parameter.
  void parameter_written() { parameter_written_ = true; }
  /// Whether a new step may begin, because a parameter has been written in this one.
  bool awaits_step() const { return parameter_written_; }
  /// Returns whether a new step begins with this operator, which records gradients outside of backward and is
  /// about to use these pages that were used before.
  bool begins_step(const std::string& op, const Uses& known);
  /// Ends the step. Returns whether a new plan should be made.
  bool end_step();
  /// Returns what a plan is to be made from, or nothing if none is to be made. Without a plan the page with
  /// the farthest next use leaves on demand.
  std::optional<PlanWanted> wants_plan(std::uint64_t budget_bytes, const SwapSpeeds& speeds);
  /// Uses the plan, unless another step is followed by now.
  void use_plan(SwapPlan plan, const PlanWanted& wanted);

  /// Begins an operator that uses these pages, and returns its position in the step.
  std::size_t begin_operator(const std::string& op, const Uses& uses);
  /// Notes that its pages are in memory. `fixed_bytes` is what is alive besides pages; `needed_bytes` also
  /// includes pinned pages.
  void operator_runs(std::uint64_t fixed_bytes, std::uint64_t needed_bytes);
  /// Notes an allocation inside the operator.
  void allocates(std::uint64_t needed_bytes) { needed_most_ = std::max(needed_most_, needed_bytes); }
  /// Ends the operator. `waited_seconds` is the total time that the program has waited for pages so far.
  void end_operator(std::size_t position, const Uses& uses, c10::ArrayRef<LearnedPage*> results,
                    double waited_seconds);
  /// Returns the moves that the plan starts after the operator at this position.
  c10::ArrayRef<SwapMove> moves(std::size_t position) const;

  /// Returns the largest `fixed_bytes` in the step that is followed.
  std::uint64_t fixed_bytes() const { return fixed_bytes_; }
  /// Returns the least budget for the step that was learnt last; 0 until one was.
  std::uint64_t least_bytes() const { return least_bytes_; }

 private:
  using Clock = std::chrono::steady_clock;

  StepLearner learner_;
  SwapPlan plan_;
  bool prefetch_ = true;
  bool parameter_written_ = false;
  std::uint64_t fixed_bytes_ = 0;
  std::uint64_t fixed_most_ = 0;  ///< the largest `fixed_bytes` in the current step
  std::uint64_t least_bytes_ = 0;
  std::uint64_t needed_before_ = 0;
  std::uint64_t needed_most_ = 0;
  Clock::time_point last_end_;
  double waited_before_ = 0;
};

}  // namespace reef
