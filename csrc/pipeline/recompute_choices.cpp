#include "pipeline/recompute_choices.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "pipeline/nested_runs.h"

namespace reef {
namespace {

/// A way to divide the stages from one on into kept stages and recomputed runs.
struct Way {
  std::uint64_t bytes = 0;
  double seconds = 0;
  const RecomputeChoice* run = nullptr;  ///< that begins with the first of these stages; none: it is kept
  std::uint32_t next = 0;                ///< the stage behind the run, or behind the kept stage
  std::size_t next_way = 0;              ///< the index of the way from `next` on
};

constexpr std::size_t kMostWays = 64, kMostLimits = 6;

/// Keeps `most` elements, at even distances.
template <class Element>
void thin(std::vector<Element>& all, std::size_t most) {
  if (all.size() <= most) return;
  std::vector<Element> some;
  for (std::size_t i = 0; i < most; ++i) some.push_back(std::move(all[i * (all.size() - 1) / (most - 1)]));
  all = std::move(some);
}

/// Keeps the ways that no other way beats in both bytes and seconds, in ascending order of bytes.
void leave_best(std::vector<Way>& ways) {
  std::sort(ways.begin(), ways.end(), [](const Way& a, const Way& b) {
    return std::pair(a.bytes, a.seconds) < std::pair(b.bytes, b.seconds);
  });
  double least = std::numeric_limits<double>::infinity();
  std::vector<Way> best;
  for (const Way& way : ways) {
    if (way.seconds >= least) continue;
    least = way.seconds;
    best.push_back(way);
  }
  ways = std::move(best);
}

bool is_faster(const RecomputeChoice& a, const RecomputeChoice& b) {
  return std::tuple(a.seconds, a.kept_bytes, a.run_bytes) < std::tuple(b.seconds, b.kept_bytes, b.run_bytes);
}

class Chooser {
 public:
  Chooser(const PipelineProfile& profile, std::uint32_t first, std::uint32_t end)
      : profile_(profile), first_(first), end_(end) {
    for (std::uint32_t begin = first; begin < end; ++begin) {
      for (std::uint32_t next = begin + 1; next <= end; ++next) add_run({begin, next});
    }
  }

  std::vector<RecomputeChoice> choices() const {
    std::vector<RecomputeChoice> all;
    for (const std::uint64_t limit : limits()) add_choices(limit, all);
    std::sort(all.begin(), all.end(), &is_faster);
    return all;
  }

 private:
  using Runs = std::vector<RecomputeChoice>;  ///< ways to recompute the same run, the fastest first

  bool has_few() const { return end_ - first_ <= kFewStages; }

  void add_run(const RecomputedRun& run) {
    Runs& runs = runs_[{run.first, run.end}];
    runs.push_back(recompute_choice(profile_, run, {run}));
    const bool is_whole = run == RecomputedRun{first_, end_};
    if (!has_few() && !is_whole) return;
    for (RecomputedRuns& nested : planned_runs(profile_, run.first, run.end))
      runs.push_back(recompute_choice(profile_, run, std::move(nested)));
    std::sort(runs.begin(), runs.end(), &is_faster);
  }

  /// Returns limits for the bytes that a run keeps during its backward pass: what each possible run keeps, or
  /// some of these values in a long chunk.
  std::vector<std::uint64_t> limits() const {
    std::set<std::uint64_t> distinct;
    for (const auto& [stages, runs] : runs_) {
      for (const RecomputeChoice& run : runs) distinct.insert(run.run_bytes);
    }
    std::vector<std::uint64_t> all(distinct.begin(), distinct.end());
    if (!has_few()) thin(all, kMostLimits);
    return all;
  }

  void add_choices(std::uint64_t limit, std::vector<RecomputeChoice>& to) const {
    std::vector<std::vector<Way>> from(end_ - first_ + 1);
    from.back().push_back({});
    for (std::uint32_t stage = end_; stage-- > first_;) {
      std::vector<Way>& ways = from[stage - first_];
      const auto add = [&](std::uint32_t next, const RecomputeChoice* run, std::uint64_t bytes,
                           double seconds) {
        const std::vector<Way>& behind = from[next - first_];
        for (std::size_t way = 0; way < behind.size(); ++way)
          ways.push_back({behind[way].bytes + bytes, behind[way].seconds + seconds, run, next, way});
      };
      add(stage + 1, nullptr, profile_.stages[stage].kept_bytes, 0);
      for (std::uint32_t next = stage + 1; next <= end_; ++next) {
        const Runs& runs = runs_.at({stage, next});
        const auto run = std::find_if(runs.begin(), runs.end(),
                                      [&](const RecomputeChoice& each) { return each.run_bytes <= limit; });
        if (run != runs.end()) add(next, &*run, run->kept_bytes, run->seconds);
      }
      leave_best(ways);
      if (!has_few()) thin(ways, kMostWays);
    }
    for (std::size_t way = 0; way < from.front().size(); ++way) to.push_back(choice(from, way));
  }

  RecomputeChoice choice(const std::vector<std::vector<Way>>& from, std::size_t way) const {
    RecomputeChoice choice;
    choice.kept_bytes = from.front()[way].bytes;
    choice.seconds = from.front()[way].seconds;
    for (std::uint32_t stage = first_; stage < end_;) {
      const Way& taken = from[stage - first_][way];
      if (taken.run != nullptr) {
        choice.runs.insert(choice.runs.end(), taken.run->runs.begin(), taken.run->runs.end());
        choice.run_bytes = std::max(choice.run_bytes, taken.run->run_bytes);
      }
      stage = taken.next;
      way = taken.next_way;
    }
    return choice;
  }

  const PipelineProfile& profile_;
  std::uint32_t first_, end_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Runs> runs_;
};

}  // namespace

std::vector<RecomputeChoice> recompute_choices(const PipelineProfile& profile, std::uint32_t first,
                                               std::uint32_t end) {
  return Chooser(profile, first, end).choices();
}

}  // namespace reef
