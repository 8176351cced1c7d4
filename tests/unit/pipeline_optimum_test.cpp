// For a few micro-batches, schedules of the table are the best of all orders that fit into their memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "reef/pipeline_generator.h"
#include "reef/pipeline_simulation.h"
#include "support/pipelines.h"

namespace reef {
namespace {

using test::pipeline_costs;
using test::Times;

/// Finds the least makespan over all orders in which each rank takes micro-batches by number, with at most
/// `limit` of them in flight on a rank, by a search that leaves out what another state is at least as good
/// as.
class OrderSearch {
 public:
  OrderSearch(std::uint32_t ranks, std::uint32_t micro_batches, const Times& times,
              std::vector<std::uint32_t> limit, bool splits)
      : ranks_(ranks),
        micro_batches_(micro_batches),
        times_(times),
        limit_(std::move(limit)),
        splits_(splits) {}

  double least() {
    State state;
    state.ranks.resize(ranks_);
    search(state);
    return best_;
  }

 private:
  struct OfRank {
    std::uint32_t weights = 0;
    double free = 0;
    std::vector<double> forward_ends, input_ends;
  };
  struct State {
    std::vector<OfRank> ranks;
  };
  struct Option {
    double begin;
    std::uint32_t rank;
    PipelineAction::Kind kind;
  };
  using Kind = PipelineAction::Kind;

  double seconds(Kind kind) const {
    if (kind == Kind::kForward) return times_.f;
    return kind == Kind::kWeight ? times_.w : times_.i + (splits_ ? 0 : times_.w);
  }

  std::vector<Option> options(const State& state) const {
    std::vector<Option> all;
    for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
      const OfRank& of = state.ranks[rank];
      const std::size_t forwards = of.forward_ends.size(), inputs = of.input_ends.size();
      if (forwards < micro_batches_ && forwards - of.weights < limit_[rank]) {
        if (rank == 0) {
          all.push_back({of.free, rank, Kind::kForward});
        } else if (state.ranks[rank - 1].forward_ends.size() > forwards) {
          all.push_back(
              {std::max(of.free, state.ranks[rank - 1].forward_ends[forwards]), rank, Kind::kForward});
        }
      }
      if (inputs < forwards) {
        if (rank + 1 == ranks_) {
          all.push_back({std::max(of.free, of.forward_ends[inputs]), rank, Kind::kInput});
        } else if (state.ranks[rank + 1].input_ends.size() > inputs) {
          all.push_back({std::max(of.free, state.ranks[rank + 1].input_ends[inputs]), rank, Kind::kInput});
        }
      }
      if (splits_ && of.weights < inputs) all.push_back({of.free, rank, Kind::kWeight});
    }
    return all;
  }

  double bound(const State& state) const {
    double most = 0;
    for (const OfRank& of : state.ranks) {
      const double left = (micro_batches_ - static_cast<double>(of.forward_ends.size())) * times_.f +
                          (micro_batches_ - static_cast<double>(of.input_ends.size())) * times_.i +
                          (micro_batches_ - static_cast<double>(of.weights)) * times_.w;
      most = std::max(most, of.free + left);
    }
    return most;
  }

  /// Whether a state that was seen before has done the same, and each part of it at least as early.
  bool is_no_better(const State& state) {
    std::vector<std::size_t> done;
    std::vector<double> when;
    for (const OfRank& of : state.ranks) {
      done.insert(done.end(), {of.forward_ends.size(), of.input_ends.size(), of.weights});
      when.push_back(of.free);
      when.insert(when.end(), of.forward_ends.begin(), of.forward_ends.end());
      when.insert(when.end(), of.input_ends.begin(), of.input_ends.end());
    }
    const auto as_early = [](const std::vector<double>& a, const std::vector<double>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) { return x <= y; });
    };
    std::vector<std::vector<double>>& seen = seen_[done];
    for (const std::vector<double>& other : seen) {
      if (as_early(other, when)) return true;
    }
    std::erase_if(seen, [&](const std::vector<double>& other) { return as_early(when, other); });
    seen.push_back(std::move(when));
    return false;
  }

  void search(const State& state) {
    if (bound(state) >= best_ || is_no_better(state)) return;
    const std::vector<Option> all = options(state);
    if (all.empty()) {
      for (const OfRank& of : state.ranks) {
        if (of.weights < micro_batches_) return;
      }
      best_ = bound(state);
      return;
    }
    // Of two actions the one that begins before the other could end is tried first, or that other one is.
    double first_end = all.front().begin + seconds(all.front().kind);
    for (const Option& option : all) first_end = std::min(first_end, option.begin + seconds(option.kind));
    for (const Option& option : all) {
      if (option.begin >= first_end) continue;
      State next = state;
      OfRank& of = next.ranks[option.rank];
      of.free = option.begin + seconds(option.kind);
      if (option.kind == Kind::kForward) of.forward_ends.push_back(of.free);
      if (option.kind == Kind::kInput) of.input_ends.push_back(of.free);
      if (option.kind == Kind::kWeight || (option.kind == Kind::kInput && !splits_)) ++of.weights;
      search(next);
    }
  }

  std::uint32_t ranks_, micro_batches_;
  Times times_;
  std::vector<std::uint32_t> limit_;
  bool splits_;
  double best_ = 1e9;
  std::map<std::vector<std::size_t>, std::vector<std::vector<double>>> seen_;
};

TEST(PipelineOptimum, NoOrderIsFasterForAFewMicroBatches) {
  for (const auto& [ranks, micro_batches] :
       std::vector<std::pair<std::uint32_t, std::uint32_t>>{{2, 2}, {2, 3}, {2, 4}, {3, 2}, {3, 3}}) {
    for (const Times& times : {Times{1, 1, 1}, Times{2, 2, 1}, Times{2, 3, 2}}) {
      const auto seconds = [&](std::string_view name, std::uint32_t hop) {
        const PipelineSchedule schedule = pipeline_schedule(name, {ranks, micro_batches, 1, {hop}});
        return simulate(pipeline_costs(ranks, times), schedule).makespan_seconds;
      };
      const auto least = [&](std::vector<std::uint32_t> limit, bool splits) {
        return OrderSearch(ranks, micro_batches, times, std::move(limit), splits).least();
      };
      const std::vector<std::uint32_t> all(ranks, micro_batches), as_many(ranks, ranks),
          twice(ranks, 2 * ranks - 1);
      const std::string told = std::to_string(ranks) + " " + std::to_string(micro_batches);
      EXPECT_EQ(seconds("1f1b", 1), least(all, false)) << told;  // no memory helps
      EXPECT_EQ(seconds("gpipe", 1), least(all, false)) << told;
      if (ranks * micro_batches > 8) continue;
      if (micro_batches < ranks) continue;
      EXPECT_EQ(seconds("zero_bubble", 1), least(as_many, true)) << told;
      if (micro_batches < 2 * ranks - 1) continue;
      EXPECT_EQ(seconds("zero_bubble", 2), least(twice, true)) << told;
    }
  }
}

}  // namespace
}  // namespace reef
