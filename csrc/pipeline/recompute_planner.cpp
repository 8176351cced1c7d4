#include "pipeline/recompute_planner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "pipeline/progress.h"
#include "pipeline/recompute_choices.h"

namespace reef {

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

RecomputePlanner::Freed RecomputePlanner::freed(const RecomputedRun& chunk, const PipelineSchedule& schedule,
                                                std::uint32_t number) {
  std::int64_t kept = 0;
  for (std::uint32_t stage = chunk.first; stage < chunk.end; ++stage)
    kept += static_cast<std::int64_t>(profile_.stages[stage].kept_bytes);
  return Freed(choices(chunk), schedule, number, kept);
}

RecomputedRuns RecomputePlanner::runs(const PipelineCuts& cuts, const PipelineSchedule& schedule,
                                      const std::vector<std::uint64_t>& bytes) {
  const RecomputedRuns chunks = whole_chunks(static_cast<std::uint32_t>(profile_.stages.size()), cuts);
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
    const Freed first = freed(chunks[own.front()], schedule, own.front());
    if (own.size() == 1) {
      chosen[own.front()] = &first.choice(first.first_that_frees(wanted));
      continue;
    }
    const Freed second = freed(chunks[own.back()], schedule, own.back());
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
