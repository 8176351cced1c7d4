#include "reef/pipeline_partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <string>
#include <utility>

#include "pipeline/parcels.h"
#include "pipeline/recompute.h"
#include "pipeline/traffic.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kMostParts = 30'000;

/// The number of ranks that a profile is of. Throws ConfigError if chunks are placed on others.
std::size_t ranks_of(const PipelineProfile& profile, std::span<const std::uint32_t> rank_of) {
  const std::size_t placed = std::size_t{*std::max_element(rank_of.begin(), rank_of.end())} + 1;
  std::size_t ranks = placed;
  if (!profile.speeds.empty()) {
    ranks = profile.speeds.size();
  } else if (profile.links.size() > 1) {
    ranks = static_cast<std::size_t>(std::lround(std::sqrt(static_cast<double>(profile.links.size()))));
  }
  if (placed > ranks)
    throw ConfigError("PipelineProfile: a chunk is on rank " + to_string(placed - 1) +
                      ", and the profile has speeds or links of " + to_string(ranks) + " ranks");
  return ranks;
}

/// Seconds of runs of stages and of messages between chunks, for a placement.
class Prices {
 public:
  Prices(const PipelineProfile& profile, std::span<const std::uint32_t> rank_of)
      : profile_(profile), rank_of_(rank_of), ranks_(ranks_of(profile, rank_of)), until_(1) {
    check_costs({profile.stages, profile.speeds, profile.links}, ranks_);
    for (const PipelineChunkCost& stage : profile.stages)
      until_.push_back(until_.back() + stage.forward_seconds + stage.input_seconds + stage.weight_seconds);
  }

  std::uint32_t stages() const { return static_cast<std::uint32_t>(profile_.stages.size()); }
  std::uint32_t chunks() const { return static_cast<std::uint32_t>(rank_of_.size()); }

  /// Gives T of a chunk that has the stages from `begin` until before `end`.
  double chunk_seconds(std::uint32_t chunk, std::uint32_t begin, std::uint32_t end) const {
    const double speed = profile_.speeds.empty() ? 1 : profile_.speeds[rank_of_[chunk]];
    return (until_[end] - until_[begin]) / speed;
  }
  /// Gives C between a chunk and the next one, which begins with stage `cut`.
  double message_seconds(std::uint32_t chunk, std::uint32_t cut) const {
    const std::uint32_t from = rank_of_[chunk], to = rank_of_[chunk + 1];
    if (from == to) return 0;
    return reef::message_seconds(link_between(profile_.links, ranks_, from, to),
                                 profile_.stages[cut - 1].output_bytes);
  }

 private:
  const PipelineProfile& profile_;
  std::span<const std::uint32_t> rank_of_;
  std::size_t ranks_;
  std::vector<double> until_;  ///< seconds of the stages before each one, and of all
};

/// What an objective knows of the first chunks: a sum and a maximum, neither of which shrinks with another
/// chunk.
struct Value {
  double sum = 0;
  double most = 0;
};

/// A chunk behind others: its seconds, and those of the messages before and behind it.
struct Piece {
  double seconds = 0;
  double before = 0;
  double behind = 0;
};

Value with(PipelineObjective objective, Value value, const Piece& piece, std::uint32_t micro_batches) {
  const double repeated = micro_batches - 1.0;
  switch (objective) {
    case PipelineObjective::kPipeDream:
      return {0, std::max({value.most, piece.seconds, 2 * piece.behind})};
    case PipelineObjective::kPipeTorch:
      return {0, std::max(value.most, piece.seconds + 2 * piece.before + 2 * piece.behind)};
    case PipelineObjective::kDapple:  // a message is a chunk of its own
      value.sum += piece.seconds;
      value.most = std::max(value.most, value.sum + repeated * piece.seconds);
      value.sum += 2 * piece.behind;
      value.most = std::max(value.most, value.sum + repeated * 2 * piece.behind);
      return value;
    case PipelineObjective::kSumAndMax:
      return {value.sum + piece.seconds + 2 * piece.behind, std::max(value.most, repeated * piece.seconds)};
  }
  return value;
}

/// What first chunks and those behind them cost together.
Value joined(PipelineObjective objective, const Value& first, const Value& rest) {
  const double before = objective == PipelineObjective::kDapple ? first.sum : 0;
  return {first.sum + rest.sum, std::max(first.most, before + rest.most)};
}

double seconds_of(PipelineObjective objective, const Value& value) {
  return objective == PipelineObjective::kSumAndMax ? value.sum + value.most : value.most;
}

/// Searches cuts from the first chunk on, the most promising first. What the rest costs at least is found
/// beforehand, from the last chunk on: the least sum and the least maximum, each as if the other did not
/// count.
class Search {
 public:
  Search(PipelineObjective objective, const Prices& prices, std::uint32_t micro_batches)
      : objective_(objective), prices_(prices), micro_batches_(micro_batches) {
    find_least();
  }

  std::vector<PipelineCuts> best(std::size_t count) {
    std::vector<PipelineCuts> found;
    open_.push(part({}, {}, 0));
    while (!open_.empty() && found.size() < count) {
      const Part next = open_.top();
      open_.pop();
      if (next.is_whole) {
        found.push_back(next.cuts);
      } else {
        extend(next);
      }
    }
    return found;
  }

 private:
  struct Part {
    double at_least = 0;
    PipelineCuts cuts;
    Value value;
    bool is_whole = false;
  };
  struct Later {
    bool operator()(const Part& a, const Part& b) const { return a.at_least > b.at_least; }
  };

  std::uint32_t last() const { return prices_.chunks() - 1; }

  Piece piece(std::uint32_t chunk, std::uint32_t begin, std::uint32_t end) const {
    return {prices_.chunk_seconds(chunk, begin, end),
            chunk == 0 ? 0 : prices_.message_seconds(chunk - 1, begin),
            chunk == last() ? 0 : prices_.message_seconds(chunk, end)};
  }

  /// Of the chunks from `chunk` on, if the first of them begins with stage `begin`.
  Value& least(std::uint32_t chunk, std::uint32_t begin) {
    return least_[std::size_t{chunk} * (prices_.stages() + 1) + begin];
  }

  void find_least() {
    least_.assign(std::size_t{prices_.chunks()} * (prices_.stages() + 1), {kNever, kNever});
    for (std::uint32_t chunk = prices_.chunks(); chunk-- > 0;) {
      for (std::uint32_t begin = chunk; begin < prices_.stages(); ++begin) {
        Value& best = least(chunk, begin);
        const std::uint32_t first_end = chunk == last() ? prices_.stages() : begin + 1;
        for (std::uint32_t end = first_end; end <= prices_.stages(); ++end) {
          const Value rest = chunk == last() ? Value{} : least(chunk + 1, end);
          const Value alone = with(objective_, {}, piece(chunk, begin, end), micro_batches_);
          const Value both = joined(objective_, alone, rest);
          best = {std::min(best.sum, both.sum), std::min(best.most, both.most)};
        }
      }
    }
  }

  /// The part of cuts behind which a chunk begins with stage `begin`.
  Part part(PipelineCuts cuts, const Value& value, std::uint32_t begin) {
    const Value whole = joined(objective_, value, least(static_cast<std::uint32_t>(cuts.size()), begin));
    return {seconds_of(objective_, whole), std::move(cuts), value, false};
  }

  /// Adds each next cut; once there are very many parts, only the most promising one.
  void extend(const Part& from) {
    const auto chunk = static_cast<std::uint32_t>(from.cuts.size());
    const std::uint32_t begin = chunk == 0 ? 0 : from.cuts.back();
    if (chunk == last()) {
      const Value value = with(objective_, from.value, piece(chunk, begin, prices_.stages()), micro_batches_);
      open_.push({seconds_of(objective_, value), from.cuts, value, true});
      return;
    }
    const bool is_full = open_.size() > kMostParts;
    Part best{kNever, {}, {}, false};
    for (std::uint32_t end = begin + 1; end < prices_.stages(); ++end) {
      PipelineCuts cuts = from.cuts;
      cuts.push_back(end);
      Part next =
          part(std::move(cuts), with(objective_, from.value, piece(chunk, begin, end), micro_batches_), end);
      if (next.at_least == kNever) continue;
      if (!is_full) {
        open_.push(std::move(next));
      } else if (next.at_least < best.at_least) {
        best = std::move(next);
      }
    }
    if (best.at_least < kNever) open_.push(std::move(best));
  }

  PipelineObjective objective_;
  const Prices& prices_;
  std::uint32_t micro_batches_;
  std::vector<Value> least_;
  std::priority_queue<Part, std::vector<Part>, Later> open_;
};

void check_cuts(const PipelineProfile& profile, const PipelineCuts& cuts) {
  std::uint32_t begin = 0;
  for (const std::uint32_t cut : cuts) {
    if (cut <= begin || cut >= profile.stages.size())
      throw ConfigError("PipelineCuts: a chunk begins with stage " + to_string(cut) + " of " +
                        to_string(profile.stages.size()) + ", behind one that begins with stage " +
                        to_string(begin) + "; give ascending stages from 1, so that each chunk has one");
    begin = cut;
  }
  if (profile.stages.empty())
    throw ConfigError("PipelineProfile: a chain without a stage; give at least one");
}

/// Returns the skips between chunks.
std::vector<PipelineSkip> skips_of(const PipelineProfile& profile, const PipelineCuts& cuts) {
  const PipelineParcels checked(static_cast<std::uint32_t>(profile.stages.size()), profile.skips);
  std::vector<PipelineSkip> skips;
  for (PipelineSkip skip : profile.skips) {
    skip = between_chunks(std::move(skip), cuts);
    if (!skip.to.empty()) skips.push_back(std::move(skip));
  }
  return skips;
}

}  // namespace

std::string_view name(PipelineObjective objective) {
  switch (objective) {
    case PipelineObjective::kPipeDream:
      return "pipedream";
    case PipelineObjective::kDapple:
      return "dapple";
    case PipelineObjective::kPipeTorch:
      return "pipe_torch";
    case PipelineObjective::kSumAndMax:
      return "sum_and_max";
  }
  throw ConfigError("there is no such objective of cuts; use one of kPipelineObjectives");
}

RecomputedRuns whole_chunks(std::uint32_t stages, const PipelineCuts& cuts) {
  RecomputedRuns runs;
  for (std::size_t chunk = 0; chunk <= cuts.size(); ++chunk)
    runs.push_back({chunk == 0 ? 0 : cuts[chunk - 1], chunk < cuts.size() ? cuts[chunk] : stages});
  return runs;
}

PipelineCosts cut_costs(const PipelineProfile& profile, const PipelineCuts& cuts,
                        const RecomputedRuns& recomputed) {
  check_cuts(profile, cuts);
  const auto stages = static_cast<std::uint32_t>(profile.stages.size());
  check_runs(recomputed, stages);
  PipelineCosts costs{{}, profile.speeds, profile.links, skips_of(profile, cuts)};
  for (const RecomputedRun& chunk : whole_chunks(stages, cuts)) {
    PipelineChunkCost& cost = costs.chunks.emplace_back();
    double again = 0;
    std::uint64_t run_bytes = 0;
    for (std::uint32_t i = chunk.first; i < chunk.end; ++i) {
      const PipelineChunkCost& stage = profile.stages[i];
      cost.forward_seconds += stage.forward_seconds;
      cost.input_seconds += stage.input_seconds;
      cost.weight_seconds += stage.weight_seconds;
      cost.output_bytes = stage.output_bytes;
      cost.kept_bytes += stage.kept_bytes;
      cost.kept_after_input_bytes += stage.kept_after_input_bytes;
      cost.working_bytes = std::max(cost.working_bytes, stage.working_bytes);
      cost.fixed_bytes += stage.fixed_bytes;
    }
    for (const RecomputedRun& run : runs_within(recomputed, chunk)) {
      std::uint64_t kept = 0;
      for (std::uint32_t i = run.first; i < run.end; ++i) {
        kept += profile.stages[i].kept_bytes;
        again += profile.stages[i].forward_seconds;
      }
      cost.kept_bytes += input_bytes(profile, run) - kept;
      run_bytes = std::max(run_bytes, kept);
    }
    cost.working_bytes += run_bytes;
    cost.input_seconds += again;
    if (chunk.first > 0) continue;
    cost.weight_seconds += std::exchange(cost.input_seconds, 0);
    cost.kept_after_input_bytes = cost.kept_bytes;
  }
  return costs;
}

double objective_seconds(PipelineObjective objective, const PipelineProfile& profile,
                         const PipelineCuts& cuts, std::span<const std::uint32_t> rank_of,
                         std::uint32_t micro_batches) {
  check_cuts(profile, cuts);
  if (rank_of.size() != cuts.size() + 1)
    throw ConfigError("PipelineCuts: " + to_string(cuts.size() + 1) + " chunks are placed on " +
                      to_string(rank_of.size()) + " ranks; give one rank for each chunk");
  const Prices prices(profile, rank_of);
  Value value;
  std::uint32_t begin = 0;
  double before = 0;
  for (std::uint32_t chunk = 0; chunk <= cuts.size(); ++chunk) {
    const std::uint32_t end = chunk < cuts.size() ? cuts[chunk] : prices.stages();
    const double behind = chunk < cuts.size() ? prices.message_seconds(chunk, end) : 0;
    value = with(objective, value, {prices.chunk_seconds(chunk, begin, end), before, behind}, micro_batches);
    begin = end;
    before = behind;
  }
  return seconds_of(objective, value);
}

std::vector<PipelineCuts> best_cuts(PipelineObjective objective, const PipelineProfile& profile,
                                    std::span<const std::uint32_t> rank_of, std::uint32_t micro_batches,
                                    std::size_t count) {
  if (rank_of.empty() || rank_of.size() > profile.stages.size())
    throw ConfigError("best_cuts: " + to_string(profile.stages.size()) + " stages cannot be cut into " +
                      to_string(rank_of.size()) + " chunks; give fewer ranks, or fewer chunks for each");
  const Prices prices(profile, rank_of);
  return Search(objective, prices, micro_batches).best(count);
}

}  // namespace reef
