#include "pipeline/nested_runs.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>

#include "pipeline/recompute.h"
#include "reef/chain_profile.h"
#include "reef/chain_solver.h"
#include "reef/error.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

/// Reads a schedule from its first operation to its last.
class Reader {
 public:
  Reader(const Schedule& schedule, std::uint32_t first) : operations_(schedule.operations), first_(first) {}

  /// Reads how stages run forward, and then backward: those that have kept no tape by a forward pass more,
  /// from where something is kept. Returns whether it has found what it expected.
  bool read(std::uint32_t begin, std::uint32_t end, RecomputedRuns& runs) {
    std::map<std::uint32_t, Kind> ran;
    std::set<std::uint32_t> dropped;
    for (; next_ < operations_.size() && operations_[next_].kind != Kind::kBackward; ++next_) {
      const auto [kind, stage] = operations_[next_];
      if (kind == Kind::kLoss) continue;
      if (kind == Kind::kDropOutput) {
        dropped.insert(stage);
        continue;
      }
      const bool is_forward = kind == Kind::kForward || kind == Kind::kTaped || kind == Kind::kRetape;
      if (!is_forward || stage < begin || stage > end || !ran.try_emplace(stage, kind).second) return false;
    }
    if (ran.size() != end - begin + 1) return false;
    std::vector<RecomputedRuns> parts;  // the last stages first
    for (std::uint32_t last = end; last >= begin; --last) {
      if (ran[last] != Kind::kForward) {
        if (!went_back(last)) return false;
        continue;
      }
      std::uint32_t from = last;
      while (from > begin && ran[from - 1] == Kind::kForward && dropped.contains(from - 1)) --from;
      RecomputedRuns& part = parts.emplace_back(RecomputedRuns{{first_ + from - 1, first_ + last}});
      if (!read(from, last, part)) return false;
      last = from;
    }
    for (auto part = parts.rbegin(); part != parts.rend(); ++part)
      runs.insert(runs.end(), part->begin(), part->end());
    return true;
  }

  bool is_at_end() const { return next_ == operations_.size(); }

 private:
  bool went_back(std::uint32_t stage) {
    if (next_ == operations_.size() || operations_[next_] != ScheduleOp{Kind::kBackward, stage}) return false;
    ++next_;
    while (next_ < operations_.size() &&
           (operations_[next_].kind == Kind::kDropOutput || operations_[next_].kind == Kind::kDropTape))
      ++next_;
    return true;
  }

  const std::vector<ScheduleOp>& operations_;
  std::uint32_t first_;
  std::size_t next_ = 0;
};

/// The stages of a chunk as plan_chain() knows them. What a pass needs while it runs counts in a chunk as the
/// most that any of its stages needs, and not here.
ChainProfile chain_of(const PipelineProfile& profile, std::uint32_t first, std::uint32_t end) {
  ChainProfile chain;
  for (std::uint32_t number = first; number < end; ++number) {
    const PipelineChunkCost& cost = profile.stages[number];
    StageProfile& stage = chain.stages.emplace_back();
    stage.output_bytes = cost.output_bytes;
    stage.tape_bytes = stage.retape_bytes = cost.kept_bytes;
    stage.tape_has_input = false;  // the input is part of what it keeps
    stage.forward_bytes = cost.output_bytes;
    stage.taped_bytes = cost.kept_bytes + cost.output_bytes;
    stage.backward_bytes = number == 0 ? 0 : profile.stages[number - 1].output_bytes;
    stage.forward_seconds = stage.retape_seconds = cost.forward_seconds;
    stage.backward_seconds = cost.input_seconds + cost.weight_seconds;
  }
  return chain;
}

}  // namespace

std::optional<RecomputedRuns> runs_of_schedule(const Schedule& schedule, std::uint32_t first) {
  Reader reader(schedule, first);
  RecomputedRuns runs;
  if (schedule.stages == 0 || !reader.read(1, schedule.stages, runs) || !reader.is_at_end()) return {};
  return runs;
}

std::vector<RecomputedRuns> planned_runs(const PipelineProfile& profile, std::uint32_t first,
                                         std::uint32_t end) {
  constexpr std::uint64_t kBudgets = 4;
  const ChainSolverOptions options{.solver = ChainSolver::kDynamic, .slots = 64, .threads = 1};
  const ChainProfile chain = chain_of(profile, first, end);
  const std::uint64_t least = minimum_bytes(chain);
  const std::uint64_t most = std::max(least, natural_peak_bytes(chain));
  std::vector<RecomputedRuns> all;
  const RecomputedRun whole{first, end};
  for (std::uint64_t i = 0; i <= kBudgets; ++i) {
    const std::uint64_t budget_bytes = least + (most - least) / kBudgets * i;
    std::optional<RecomputedRuns> runs;
    try {
      runs = runs_of_schedule(plan_chain(chain, budget_bytes, options), first);
    } catch (const BudgetError&) {
      continue;  // what is rounded up to slots may not fit into the least budgets
    }
    if (!runs) continue;
    if (runs->empty() || runs->front() != whole) runs->insert(runs->begin(), whole);
    if (std::find(all.begin(), all.end(), *runs) == all.end()) all.push_back(std::move(*runs));
  }
  return all;
}

}  // namespace reef
