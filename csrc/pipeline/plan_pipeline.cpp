#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "pipeline/generators.h"
#include "pipeline/parcels.h"
#include "pipeline/progress.h"
#include "pipeline/recompute_planner.h"
#include "pipeline/traffic.h"
#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/plan_pipeline.h"
#include "timeline/axis.h"

namespace reef {
namespace {

using std::to_string;
using Order = std::vector<std::uint32_t>;  ///< the rank at each place of a pipeline

/// How the chunks of a model lie on the places of a pipeline.
enum class Placement : std::uint8_t { kStraight, kLoop, kV };
constexpr Placement kPlacements[] = {Placement::kStraight, Placement::kLoop, Placement::kV};

struct Named {
  const char* name;
  Placement placement;
  bool has_hops = false;
  bool replicates = false;  ///< each chunk is on two ranks
};
constexpr Named kNamed[] = {{"gpipe", Placement::kStraight},
                            {"1f1b", Placement::kStraight, true},
                            {"zero_bubble", Placement::kStraight, true},
                            {"interleaved", Placement::kLoop},
                            {"interleaved_zero_bubble", Placement::kLoop},
                            {"breadth_first", Placement::kLoop},
                            {"zbv", Placement::kV},
                            {"v_half", Placement::kV},
                            {"v_min", Placement::kV},
                            {"dualpipev", Placement::kV},
                            {"chimera", Placement::kStraight, false, true},
                            {"dualpipe", Placement::kStraight, false, true},
                            {"pipedream", Placement::kStraight, true},
                            {"pipedream_vertical", Placement::kStraight, true},
                            {"pipedream_2bw", Placement::kStraight, true},
                            {"pipemare", Placement::kStraight, true},
                            {"hetpipe", Placement::kStraight, true}};
const PipelineGenerator& generator_of(const Named& named) {
  const auto rows = pipeline_generators();
  return *std::find_if(rows.begin(), rows.end(),
                       [&](const PipelineGenerator& each) { return each.name == named.name; });
}
bool is_synchronous(const Named& named) { return generator_of(named).synchronous; }

/// Of an asynchronous schedule so many batches are compared, as the first one does not overlap others.
constexpr std::uint32_t kBatches = 4;
constexpr const char* kGreedy = "greedy";
using RanksPerChunk = std::vector<std::uint32_t>;  ///< empty: each chunk has one

std::vector<std::uint32_t> places(Placement placement, std::uint32_t ranks) {
  switch (placement) {
    case Placement::kStraight:
      return straight_placement(ranks);
    case Placement::kLoop:
      return loop_placement(ranks, 2);
    case Placement::kV:
      return v_placement(ranks);
  }
  return {};
}

std::vector<std::uint32_t> on_ranks(std::vector<std::uint32_t> placed, const Order& order) {
  for (std::uint32_t& place : placed) place = order[place];
  return placed;
}

PipelineSchedule on_ranks(PipelineSchedule schedule, const Order& order) {
  PipelineSchedule moved = schedule;
  for (std::vector<std::uint32_t>& direction : moved.rank_of)
    direction = on_ranks(std::move(direction), order);
  for (std::uint32_t place = 0; place < order.size(); ++place)
    moved.actions[order[place]] = std::move(schedule.actions[place]);
  return moved;
}

/// Whether no rank differs from another in speed, bytes or links, so that all orders of them are the same.
bool are_alike(const PipelineProfile& profile) {
  const auto all_same = [](const auto& values) { return std::set(values.begin(), values.end()).size() <= 1; };
  return all_same(profile.speeds) && all_same(profile.rank_bytes) && profile.links.size() <= 1;
}

/// Adds candidates, and keeps the best.
class Planner {
 public:
  Planner(const PipelineProfile& profile, std::uint32_t ranks, const PipelinePlanOptions& options)
      : profile_(profile), ranks_(ranks), options_(options) {}

  PipelinePlan plan() {
    for (const Order& order : orders()) {
      for (const Placement placement : kPlacements) try_placement(placement, order);
      if (options_.may_replicate) try_divisions(order);
    }
    if (best_) return std::move(*best_);
    refuse();
  }

 private:
  bool is_named(std::string_view name) const {
    const std::vector<std::string>& names = options_.schedules;
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  bool may_use(std::string_view name) const { return options_.schedules.empty() || is_named(name); }
  bool may_use(const Named& named) const {
    if (!is_synchronous(named)) return is_named(named.name);
    return may_use(named.name) && (!named.replicates || options_.may_replicate);
  }

  /// Orders of ranks by the objective of their best cuts, where all can be looked at.
  std::vector<Order> orders() const {
    Order order(ranks_);
    std::iota(order.begin(), order.end(), 0U);
    constexpr std::uint32_t kMostPermuted = 6;
    const bool is_asynchronous = std::any_of(std::begin(kNamed), std::end(kNamed), [&](const Named& named) {
      return !is_synchronous(named) && is_named(named.name);
    });
    if (are_alike(profile_) || ranks_ > kMostPermuted || is_asynchronous) return {order};
    std::vector<std::pair<double, Order>> all;
    do {
      all.emplace_back(least_seconds(order), order);
    } while (std::next_permutation(order.begin(), order.end()));
    std::sort(all.begin(), all.end());
    if (all.size() > options_.orders) all.resize(std::max(1U, options_.orders));
    std::vector<Order> best;
    for (auto& [seconds, of] : all) best.push_back(std::move(of));
    return best;
  }

  double least_seconds(const Order& order) const {
    constexpr PipelineObjective kObjective = PipelineObjective::kSumAndMax;
    if (options_.may_replicate)
      return best_divisions(kObjective, profile_, order, options_.micro_batches, 1).front().seconds;
    const std::vector<PipelineCuts> cuts = best_cuts(kObjective, profile_, order, options_.micro_batches, 1);
    return objective_seconds(kObjective, profile_, cuts.front(), order, options_.micro_batches);
  }

  void try_placement(Placement placement, const Order& order) {
    const std::vector<std::uint32_t> rank_of = on_ranks(places(placement, ranks_), order);
    if (rank_of.size() > profile_.stages.size()) return;
    // To write a greedy schedule takes as long as to simulate many.
    constexpr std::size_t kGreedyCuts = 4;
    const std::vector<PipelineCuts> all = best_cuts(PipelineObjective::kSumAndMax, profile_, rank_of,
                                                    options_.micro_batches, std::max(1U, options_.cuts));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const PipelineCosts costs = cut_costs(profile_, all[i]);
      for (const Named& named : kNamed) {
        if (named.placement == placement && may_use(named)) try_named(named, all[i], {}, costs, order);
      }
      if (may_use(kGreedy) && i < kGreedyCuts) try_greedy(rank_of, all[i], costs);
    }
  }

  /// Divisions in which a chunk has several ranks.
  void try_divisions(const Order& order) {
    for (const PipelineDivision& division :
         best_divisions(PipelineObjective::kSumAndMax, profile_, order, options_.micro_batches,
                        std::max(1U, options_.cuts))) {
      const RanksPerChunk& each = division.ranks_per_chunk;
      if (each.size() == ranks_) continue;
      const PipelineCosts costs = cut_costs(profile_, division.cuts);
      for (const Named& named : kNamed) {
        if (takes_ranks_per_chunk(named.name) && may_use(named))
          try_named(named, division.cuts, each, costs, order);
      }
    }
  }

  void try_named(const Named& named, const PipelineCuts& cuts, const RanksPerChunk& ranks_per_chunk,
                 const PipelineCosts& costs, const Order& order) {
    const bool splits = generator_of(named).splits, flushes = is_synchronous(named);
    if (splits && !options_.may_split) return;
    std::set<std::vector<std::uint32_t>> depths{{}};
    if (named.has_hops) depths = hops(costs, ranks_per_chunk, order, splits);
    for (const std::vector<std::uint32_t>& each : depths) {
      const PipelineShape shape{.ranks = ranks_,
                                .micro_batches = options_.micro_batches * (flushes ? 1 : kBatches),
                                .chunks_per_rank = named.placement == Placement::kStraight ? 1U : 2U,
                                .hops = each,
                                .micro_batches_per_update = flushes ? 0 : options_.micro_batches,
                                .ranks_per_chunk = ranks_per_chunk};
      if (const std::optional<PipelineSchedule> schedule = made(named, shape))
        consider({.cuts = cuts, .schedule = on_ranks(*schedule, order), .costs = costs, .hops = each});
    }
  }

  static std::optional<PipelineSchedule> made(const Named& named, const PipelineShape& shape) {
    if (!takes(named.name, shape)) return {};
    try {
      return pipeline_schedule(named.name, shape);
    } catch (const ConfigError&) {
      if (is_synchronous(named)) throw;
      return {};  // a batch has too few micro-batches for these hops
    }
  }

  /// Hops of 1 and 2 everywhere, those that hide the links, and one more or fewer than that.
  std::set<std::vector<std::uint32_t>> hops(const PipelineCosts& costs, const RanksPerChunk& ranks_per_chunk,
                                            const Order& order, bool splits) const {
    double forward = 0, backward = 0;
    std::vector<double> messages;
    const std::size_t chunks = costs.chunks.size();
    for (std::size_t chunk = 0, place = 0; chunk < chunks; ++chunk) {
      const std::uint32_t ranks = ranks_per_chunk.empty() ? 1 : ranks_per_chunk[chunk];
      const double speed = costs.speeds.empty() ? 1 : costs.speeds[order[place]];
      const PipelineChunkCost& cost = costs.chunks[chunk];
      forward += cost.forward_seconds / speed / ranks_;
      backward += (cost.input_seconds + cost.weight_seconds) / speed / ranks_;
      place += ranks;
      if (chunk + 1 == chunks) break;
      // A hop is one of each of these ranks.
      messages.push_back(message_seconds(link_between(costs.links, ranks_, order[place - 1], order[place]),
                                         cost.output_bytes) /
                         ranks);
    }
    std::set<std::vector<std::uint32_t>> all{std::vector(chunks - 1, 1U), std::vector(chunks - 1, 2U)};
    if (forward + backward <= 0) return all;
    const std::vector<std::uint32_t> rule = hops_for(messages, forward, backward, splits);
    std::vector<std::uint32_t> more = rule, fewer = rule;
    for (std::uint32_t& hop : more) ++hop;
    for (std::uint32_t& hop : fewer) hop = std::max(1U, hop - 1);
    all.insert({rule, more, fewer});
    return all;
  }

  /// With 1, 2, 4 and more passes of each chunk in flight. That does not depend on bytes, so more of them
  /// never lead to a slower plan.
  void try_greedy(const std::vector<std::uint32_t>& rank_of, const PipelineCuts& cuts,
                  const PipelineCosts& costs) {
    std::vector<std::uint32_t> chunks(ranks_);
    for (const std::uint32_t rank : rank_of) ++chunks[rank];
    for (std::uint32_t each = 1; each < 2 * std::min(options_.micro_batches, 4 * ranks_); each *= 2) {
      std::vector<std::uint32_t> most = chunks;
      for (std::uint32_t& of_rank : most) of_rank *= each;
      for (const bool splits : {false, true}) {
        if (splits && !options_.may_split) continue;
        consider({.cuts = cuts,
                  .schedule = greedy_pipeline(costs, {rank_of}, options_.micro_batches, most, splits),
                  .costs = costs});
      }
    }
  }

  std::uint64_t bytes_of(std::uint32_t rank) const {
    return profile_.rank_bytes.empty() ? std::numeric_limits<std::uint64_t>::max()
                                       : profile_.rank_bytes[rank];
  }

  std::uint64_t missing_bytes(const PipelineCost& cost, std::uint32_t rank) const {
    const std::uint64_t peak = cost.ranks[rank].peak_bytes;
    return peak - std::min(peak, bytes_of(rank));
  }

  bool fits(const PipelineCost& cost) const {
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      if (missing_bytes(cost, rank) > 0) return false;
    }
    return true;
  }

  void consider(PipelinePlan plan) {
    plan.cost = simulate(plan.costs, plan.schedule);
    // Recomputing only makes a schedule slower.
    const bool is_too_slow = best_ && plan.cost.makespan_seconds >= best_->cost.makespan_seconds;
    if (options_.may_recompute && !is_too_slow) recompute(plan);
    judge(std::move(plan));
  }

  /// Recomputes as little as makes the schedule fit. The bytes that a choice frees are an estimate, so what
  /// the simulation finds missing is added to what is to be freed: more and more of it, and at last all.
  void recompute(PipelinePlan& plan) {
    constexpr std::uint32_t kMostTries = 16;
    constexpr std::uint64_t kAll = std::uint64_t{1} << 60;
    std::vector<std::uint64_t> to_free(ranks_);
    for (std::uint32_t tries = 1; tries <= kMostTries && !fits(plan.cost); ++tries) {
      for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
        const std::uint64_t missing = missing_bytes(plan.cost, rank);
        to_free[rank] += missing * (1U << tries / 6);
        if (missing > 0 && tries == kMostTries) to_free[rank] = kAll;
      }
      plan.recomputed = recompute_planner_.runs(plan.cuts, plan.schedule, to_free);
      plan.costs = cut_costs(profile_, plan.cuts, plan.recomputed);
      plan.cost = simulate(plan.costs, plan.schedule);
    }
  }

  /// Keeps the candidate if it is the best so far or, while nothing fits, if it lacks the fewest bytes.
  void judge(PipelinePlan plan) {
    std::uint64_t missing = 0, all = 0;
    std::uint32_t short_rank = 0;
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      all += plan.cost.ranks[rank].peak_bytes;
      if (missing_bytes(plan.cost, rank) <= missing) continue;
      missing = missing_bytes(plan.cost, rank);
      short_rank = rank;
    }
    if (missing > 0) {
      if (missing >= least_missing_) return;
      least_missing_ = missing;
      missing_rank_ = short_rank;
      missing_name_ = plan.schedule.name;
      return;
    }
    // Of equally fast ones, that of fewer bytes.
    if (best_ &&
        std::pair(best_->cost.makespan_seconds, best_bytes_) <= std::pair(plan.cost.makespan_seconds, all))
      return;
    best_bytes_ = all;
    best_ = std::move(plan);
  }

  [[noreturn]] void refuse() const {
    if (missing_name_.empty())
      throw ConfigError("plan_pipeline: none of the schedules takes " + to_string(ranks_) + " ranks, " +
                        to_string(options_.micro_batches) + " micro-batches and " +
                        to_string(profile_.stages.size()) + " stages; name others, or none");
    const std::uint64_t needed = bytes_of(missing_rank_) + least_missing_;
    throw BudgetError(
        "plan_pipeline: out of memory. With the schedule that comes closest, '" + missing_name_ + "', rank " +
            to_string(missing_rank_) + " needs " + to_string(needed) + " bytes (" +
            format_bytes(static_cast<std::int64_t>(needed)) + "), and has " +
            to_string(bytes_of(missing_rank_)) + ": " + to_string(least_missing_) +
            " bytes are missing; give more ranks, smaller micro-batches, or shard optimizer states",
        needed);
  }

  const PipelineProfile& profile_;
  std::uint32_t ranks_;
  const PipelinePlanOptions& options_;
  std::optional<PipelinePlan> best_;
  std::uint64_t best_bytes_ = 0;
  RecomputePlanner recompute_planner_{profile_};
  std::uint64_t least_missing_ = std::numeric_limits<std::uint64_t>::max();
  std::uint32_t missing_rank_ = 0;
  std::string missing_name_;
};

void check_schedules(const PipelinePlanOptions& options) {
  std::string names;
  for (const Named& named : kNamed) names += std::string(named.name) + ", ";
  names += kGreedy;
  std::set<bool> kinds;  // synchronous ones, and others
  for (const std::string& given : options.schedules) {
    const auto* const named = std::find_if(std::begin(kNamed), std::end(kNamed),
                                           [&](const Named& each) { return given == each.name; });
    if (named == std::end(kNamed) && given != kGreedy)
      throw ConfigError("plan_pipeline: '" + given +
                        "' is none of the schedules that are planned with; use " + names);
    if (named != std::end(kNamed) && named->replicates && !options.may_replicate)
      throw ConfigError("plan_pipeline: '" + given + "' has each chunk on two ranks; let the plan replicate");
    kinds.insert(named == std::end(kNamed) || is_synchronous(*named));
  }
  if (kinds.size() > 1)
    throw ConfigError(
        "plan_pipeline: synchronous and asynchronous schedules train differently, so the faster one is no "
        "better; name one or the other");
}

}  // namespace

std::string PipelinePlan::text() const {
  const auto time = [](double seconds) { return duration(seconds * 1e9); };
  std::string lines = schedule.name + " of " + to_string(schedule.micro_batches) + " micro-batches over " +
                      to_string(schedule.ranks()) + " ranks" + (recomputed.empty() ? "" : ", recomputing") +
                      ": " + time(cost.makespan_seconds) + ", idle " + fixed(100 * cost.idle_share(), 1) +
                      " %\n";
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    std::string stages;
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
      if (!ranks_of_chunk(schedule, chunk).contains(rank)) continue;
      stages += (stages.empty() ? " " : " and ") + to_string(chunk == 0 ? 0 : cuts[chunk - 1]) + " to ";
      stages += chunk < cuts.size() ? to_string(cuts[chunk] - 1) : "the last";
    }
    lines += "rank " + to_string(rank) + ": stages" + stages;
    std::string again;
    for (const RecomputedRun& run : recomputed) {
      if (!ranks_of_chunk(schedule, chunk_of(run.first, cuts)).contains(rank)) continue;
      again += (again.empty() ? " " : ", ") + to_string(run.first) + " to " + to_string(run.end - 1);
    }
    if (!again.empty()) lines += ", recomputes" + again;
    const PipelineRankCost& of = cost.ranks[rank];
    lines += ", busy " + time(of.busy_seconds) + ", at most " + to_string(of.most_in_flight) +
             " passes in flight, " + format_bytes(static_cast<std::int64_t>(of.peak_bytes)) + "\n";
  }
  return lines;
}

PipelinePlan plan_pipeline(const PipelineProfile& profile, std::uint32_t ranks,
                           const PipelinePlanOptions& options) {
  check_schedules(options);
  if (ranks == 0 || options.micro_batches == 0)
    throw ConfigError("plan_pipeline: there is no rank, or no micro-batch; give at least one of each");
  if (!profile.rank_bytes.empty() && profile.rank_bytes.size() != ranks)
    throw ConfigError("plan_pipeline: there are the bytes of " + to_string(profile.rank_bytes.size()) +
                      " ranks, and " + to_string(ranks) + " ranks");
  if (profile.stages.size() < ranks && !options.may_replicate)
    throw ConfigError(
        "plan_pipeline: " + to_string(profile.stages.size()) + " stages cannot be cut for " +
        to_string(ranks) +
        " ranks; give fewer ranks, or a chain of more stages, or let chunks have several ranks");
  // What is wrong with costs is refused before a search.
  check_costs(cut_costs(profile, {}), ranks);
  return Planner(profile, ranks, options).plan();
}

}  // namespace reef
