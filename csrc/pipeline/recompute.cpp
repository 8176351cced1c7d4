#include "pipeline/recompute.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "reef/error.h"

namespace reef {

void check_runs(const RecomputedRuns& runs, std::uint32_t stages) {
  std::vector<RecomputedRun> around = {{0, stages}};  // the runs in which the next one may lie
  for (const RecomputedRun& run : runs) {
    while (around.size() > 1 && around.back().end <= run.first) around.pop_back();
    const bool is_ascending = &run == &runs.front() || run.first >= (&run - 1)->first;
    const bool is_another = &run == &runs.front() || run != *(&run - 1);
    if (!is_ascending || !is_another || run.end <= run.first || run.end > around.back().end)
      throw ConfigError("RecomputedRun: stages " + std::to_string(run.first) + " to before " +
                        std::to_string(run.end) + " of " + std::to_string(stages) +
                        " are no run that is behind the one before, or within it; give ascending runs of one "
                        "stage at least");
    around.push_back(run);
  }
}

RecomputedRuns runs_within(const RecomputedRuns& runs, const RecomputedRun& chunk) {
  RecomputedRuns within;
  for (const RecomputedRun& run : runs) {
    const RecomputedRun part{std::max(run.first, chunk.first), std::min(run.end, chunk.end)};
    if (part.first < part.end && (within.empty() || part != within.back())) within.push_back(part);
  }
  return within;
}

std::uint64_t input_bytes(const PipelineProfile& profile, const RecomputedRun& run) {
  const auto is_inside = [&](std::uint32_t stage) { return stage >= run.first && stage < run.end; };
  std::uint64_t bytes = run.first == 0 ? 0 : profile.stages[run.first - 1].output_bytes;
  for (const PipelineSkip& skip : profile.skips) {
    if (!is_inside(skip.from) && std::any_of(skip.to.begin(), skip.to.end(), is_inside)) bytes += skip.bytes;
  }
  return bytes;
}

namespace {

/// What a run costs when it is recomputed, with the runs within it.
struct NestedCost {
  std::uint64_t peak_bytes = 0;
  double seconds = 0;
};
/// Takes the run at `next`, and those within it.
NestedCost nested_cost(const PipelineProfile& profile, const RecomputedRuns& runs, std::size_t& next) {
  const RecomputedRun run = runs[next++];
  NestedCost cost;
  std::uint64_t kept = 0;  // by the stages so far, and of what enters the runs within
  for (std::uint32_t stage = run.first; stage < run.end;) {
    if (next < runs.size() && runs[next].first == stage) {
      const RecomputedRun inner = runs[next];
      kept += input_bytes(profile, inner);  // of its first stage, too: a run that is recomputed has copies
      const NestedCost of_inner = nested_cost(profile, runs, next);
      cost.peak_bytes = std::max(cost.peak_bytes, kept + of_inner.peak_bytes);
      cost.seconds += of_inner.seconds;
      for (; stage < inner.end; ++stage) cost.seconds += profile.stages[stage].forward_seconds;
      continue;
    }
    kept += profile.stages[stage].kept_bytes;
    cost.seconds += profile.stages[stage++].forward_seconds;
  }
  cost.peak_bytes = std::max(cost.peak_bytes, kept);
  return cost;
}

}  // namespace

RecomputeChoice recompute_choice(const PipelineProfile& profile, const RecomputedRun& chunk,
                                 RecomputedRuns runs) {
  RecomputeChoice choice;
  for (std::size_t next = 0, stage = chunk.first; stage < chunk.end;) {
    if (next < runs.size() && runs[next].first == stage) {
      const RecomputedRun run = runs[next];
      const NestedCost cost = nested_cost(profile, runs, next);
      choice.kept_bytes += input_bytes(profile, run);
      choice.run_bytes = std::max(choice.run_bytes, cost.peak_bytes);
      choice.seconds += cost.seconds;
      stage = run.end;
      continue;
    }
    choice.kept_bytes += profile.stages[stage++].kept_bytes;
  }
  choice.runs = std::move(runs);
  return choice;
}

}  // namespace reef
