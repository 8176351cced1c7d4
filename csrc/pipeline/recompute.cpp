#include "pipeline/recompute.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "pipeline/progress.h"
#include "reef/error.h"

namespace reef {
namespace {

/// A way to divide the stages from one on into kept stages and recomputed runs.
struct Way {
  std::uint64_t bytes = 0;
  double seconds = 0;
  bool recomputes = false;   ///< whether a run begins with the first of these stages
  std::uint32_t next = 0;    ///< the stage behind the run, or behind the kept stage
  std::size_t next_way = 0;  ///< the index of the way from `next` on
};

/// In chunks of more stages than this, only some of the best ways are followed.
constexpr std::uint32_t kFewStages = 8;
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

class Chooser {
 public:
  Chooser(const PipelineProfile& profile, std::uint32_t first, std::uint32_t end)
      : profile_(profile), first_(first), end_(end) {}

  std::vector<RecomputeChoice> choices() const {
    std::vector<RecomputeChoice> all;
    for (const std::uint64_t limit : limits()) add_choices(limit, all);
    std::sort(all.begin(), all.end(), [](const RecomputeChoice& a, const RecomputeChoice& b) {
      return std::tuple(a.seconds, a.kept_bytes, a.run_bytes) <
             std::tuple(b.seconds, b.kept_bytes, b.run_bytes);
    });
    return all;
  }

 private:
  std::uint64_t run_bytes(std::uint32_t begin, std::uint32_t end) const {
    std::uint64_t bytes = 0;
    for (std::uint32_t stage = begin; stage < end; ++stage) bytes += profile_.stages[stage].kept_bytes;
    return bytes;
  }

  /// Returns limits for the bytes that a run keeps during its backward pass: what each possible run keeps, or
  /// some of these values in a long chunk.
  std::vector<std::uint64_t> limits() const {
    std::set<std::uint64_t> distinct;
    for (std::uint32_t begin = first_; begin < end_; ++begin) {
      for (std::uint32_t end = begin + 1; end <= end_; ++end) distinct.insert(run_bytes(begin, end));
    }
    std::vector<std::uint64_t> all(distinct.begin(), distinct.end());
    if (!has_few()) thin(all, kMostLimits);
    return all;
  }

  bool has_few() const { return end_ - first_ <= kFewStages; }

  void add_choices(std::uint64_t limit, std::vector<RecomputeChoice>& to) const {
    std::vector<std::vector<Way>> from(end_ - first_ + 1);
    from.back().push_back({});
    for (std::uint32_t stage = end_; stage-- > first_;) {
      std::vector<Way>& ways = from[stage - first_];
      const auto add = [&](std::uint32_t next, bool recomputes, std::uint64_t bytes, double seconds) {
        const std::vector<Way>& behind = from[next - first_];
        for (std::size_t way = 0; way < behind.size(); ++way)
          ways.push_back({behind[way].bytes + bytes, behind[way].seconds + seconds, recomputes, next, way});
      };
      add(stage + 1, false, profile_.stages[stage].kept_bytes, 0);
      std::uint64_t kept = 0;
      double seconds = 0;
      for (std::uint32_t next = stage + 1; next <= end_; ++next) {
        kept += profile_.stages[next - 1].kept_bytes;
        seconds += profile_.stages[next - 1].forward_seconds;
        if (kept > limit) break;
        add(next, true, input_bytes(profile_, {stage, next}), seconds);
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
      if (taken.recomputes) {
        choice.runs.push_back({stage, taken.next});
        choice.run_bytes = std::max(choice.run_bytes, run_bytes(stage, taken.next));
      }
      stage = taken.next;
      way = taken.next_way;
    }
    return choice;
  }

  const PipelineProfile& profile_;
  std::uint32_t first_, end_;
};

}  // namespace

void check_runs(const RecomputedRuns& runs, std::uint32_t stages) {
  std::uint32_t before = 0;
  for (const RecomputedRun& run : runs) {
    if (run.first < before || run.end <= run.first || run.end > stages)
      throw ConfigError(
          "RecomputedRun: stages " + std::to_string(run.first) + " to before " + std::to_string(run.end) +
          " of " + std::to_string(stages) +
          " are no run that is behind the one before; give ascending runs of one stage at least");
    before = run.end;
  }
}

RecomputedRuns runs_within(const RecomputedRuns& runs, const RecomputedRun& chunk) {
  RecomputedRuns within;
  for (const RecomputedRun& run : runs) {
    const RecomputedRun part{std::max(run.first, chunk.first), std::min(run.end, chunk.end)};
    if (part.first < part.end) within.push_back(part);
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

std::vector<RecomputeChoice> recompute_choices(const PipelineProfile& profile, std::uint32_t first,
                                               std::uint32_t end) {
  return Chooser(profile, first, end).choices();
}

const std::vector<RecomputeChoice>& RecomputePlanner::choices(const RecomputedRun& chunk) {
  const auto [at, is_new] = choices_.try_emplace({chunk.first, chunk.end});
  if (is_new) at->second = recompute_choices(profile_, chunk.first, chunk.end);
  return at->second;
}

/// The bytes that each choice of a chunk frees, over all of its passes in flight.
class RecomputePlanner::Freed {
 public:
  Freed(const std::vector<RecomputeChoice>& choices, const PipelineSchedule& schedule, std::uint32_t chunk,
        std::int64_t kept_bytes)
      : choices_(choices) {
    std::uint32_t in_flight_on_a_rank = 0;
    for (const std::uint32_t rank : ranks_of_chunk(schedule, chunk))
      in_flight_on_a_rank = std::max(in_flight_on_a_rank, most_in_flight(schedule.actions[rank], chunk));
    const std::int64_t in_flight = in_flight_on_a_rank;
    for (const RecomputeChoice& choice : choices) {
      bytes_.push_back(in_flight * (kept_bytes - static_cast<std::int64_t>(choice.kept_bytes)) -
                       static_cast<std::int64_t>(choice.run_bytes));
      most_.push_back(most_.empty() ? bytes_.back() : std::max(most_.back(), bytes_.back()));
    }
  }

  std::size_t size() const { return bytes_.size(); }
  std::int64_t bytes(std::size_t choice) const { return bytes_[choice]; }
  const RecomputeChoice& choice(std::size_t number) const { return choices_[number]; }
  /// Returns the first choice that frees so many bytes or, if none does, that which frees the most.
  std::size_t first_that_frees(std::int64_t bytes) const {
    return static_cast<std::size_t>(
        std::lower_bound(most_.begin(), most_.end(), std::min(bytes, most_.back())) - most_.begin());
  }

 private:
  const std::vector<RecomputeChoice>& choices_;
  std::vector<std::int64_t> bytes_;
  std::vector<std::int64_t> most_;  ///< the most that this choice, or one before it, frees
};

RecomputedRuns RecomputePlanner::runs(const PipelineCuts& cuts, const PipelineSchedule& schedule,
                                      const std::vector<std::uint64_t>& bytes) {
  const RecomputedRuns chunks = whole_chunks(static_cast<std::uint32_t>(profile_.stages.size()), cuts);
  const auto freed_by = [&](std::uint32_t chunk) {
    std::int64_t kept = 0;
    for (std::uint32_t stage = chunks[chunk].first; stage < chunks[chunk].end; ++stage)
      kept += static_cast<std::int64_t>(profile_.stages[stage].kept_bytes);
    return Freed(choices(chunks[chunk]), schedule, chunk, kept);
  };
  std::vector<const RecomputeChoice*> chosen(chunks.size());
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<std::uint32_t> own;
    for (std::uint32_t chunk = 0; chunk < chunks.size(); ++chunk) {
      if (ranks_of_chunk(schedule, chunk).contains(rank)) own.push_back(chunk);
    }
    std::uint64_t most = 0;
    for (const std::uint32_t sharing : ranks_of_chunk(schedule, own.front()))
      most = std::max(most, bytes[sharing]);
    const auto wanted = static_cast<std::int64_t>(most);
    const Freed first = freed_by(own.front());
    if (own.size() == 1) {
      chosen[own.front()] = &first.choice(first.first_that_frees(wanted));
      continue;
    }
    const Freed second = freed_by(own.back());
    // Choices that free more than enough count as if they freed just enough.
    std::pair<std::int64_t, double> least{std::numeric_limits<std::int64_t>::max(), 0};
    for (std::size_t a = 0; a < first.size(); ++a) {
      const std::size_t b = second.first_that_frees(wanted - first.bytes(a));
      const std::int64_t both = first.bytes(a) + second.bytes(b);
      const std::pair value{wanted - std::min(both, wanted),
                            first.choice(a).seconds + second.choice(b).seconds};
      if (value >= least) continue;
      least = value;
      chosen[own.front()] = &first.choice(a);
      chosen[own.back()] = &second.choice(b);
    }
  }
  RecomputedRuns all;
  for (const RecomputeChoice* const of_chunk : chosen)
    all.insert(all.end(), of_chunk->runs.begin(), of_chunk->runs.end());
  return all;
}

}  // namespace reef
