// What the schedules of the table cost: peaks and makespans are the formulas of the literature, exactly.
#include "reef/pipeline_generator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline/progress.h"
#include "reef/pipeline_simulation.h"
#include "support/config_error.h"
#include "support/pipelines.h"

namespace reef {
namespace {

using test::config_error;
using test::kTimes;
using test::pipeline_costs;
using test::Times;

constexpr std::uint32_t kMostRanks = 7, kMostMicroBatches = 19;

struct Case {
  PipelineShape shape;
  Times times;
  PipelineCost cost;
  double s() const { return shape.ranks; }
  double m() const { return shape.micro_batches; }
  std::string told;
};

/// Simulates a schedule for all small shapes and several times of F, I and W, without links.
template <class Visit>
void for_each_case(std::string_view name, std::uint32_t chunks_per_rank, std::uint32_t hop,
                   const Visit& visit) {
  for (std::uint32_t ranks = 1; ranks <= kMostRanks; ++ranks) {
    for (std::uint32_t micro_batches = 1; micro_batches <= kMostMicroBatches; ++micro_batches) {
      const PipelineShape shape{ranks, micro_batches, chunks_per_rank, {hop}};
      PipelineSchedule schedule;
      if (!config_error([&] { schedule = pipeline_schedule(name, shape); }).empty()) continue;
      for (const Times& times : kTimes) {
        const std::string told = std::string(name) + ", ranks " + std::to_string(ranks) + ", micro-batches " +
                                 std::to_string(micro_batches) + ", F " + std::to_string(times.f) + ", I " +
                                 std::to_string(times.i) + ", W " + std::to_string(times.w);
        visit(Case{shape, times, simulate(pipeline_costs(schedule.chunks(), times), schedule), told});
      }
    }
  }
}

std::vector<std::uint32_t> in_flight(const PipelineCost& cost) {
  std::vector<std::uint32_t> peaks;
  for (const PipelineRankCost& rank : cost.ranks) peaks.push_back(rank.most_in_flight);
  return peaks;
}

std::uint32_t most_in_flight(const PipelineCost& cost) {
  const std::vector<std::uint32_t> peaks = in_flight(cost);
  return *std::max_element(peaks.begin(), peaks.end());
}

/// A vector of what `peak` says of each rank.
template <class Peak>
std::vector<std::uint32_t> each_rank(const PipelineShape& shape, const Peak& peak) {
  std::vector<std::uint32_t> peaks;
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) peaks.push_back(peak(rank));
  return peaks;
}

TEST(PipelineGenerator, GpipeIsItsFormula) {
  for_each_case("gpipe", 1, 1, [](const Case& c) {
    EXPECT_EQ(c.cost.makespan_seconds, (c.m() + c.s() - 1) * c.times.all()) << c.told;
    EXPECT_EQ(in_flight(c.cost), each_rank(c.shape, [&](std::uint32_t) { return c.shape.micro_batches; }))
        << c.told;
  });
}

TEST(PipelineGenerator, OneForwardOneBackwardIsItsFormulaAtAnyDepth) {
  for (const std::uint32_t hop : {1U, 2U, 3U}) {
    for_each_case("1f1b", 1, hop, [&](const Case& c) {
      EXPECT_EQ(c.cost.makespan_seconds, (c.m() + c.s() - 1) * c.times.all()) << c.told;
      EXPECT_EQ(in_flight(c.cost), each_rank(c.shape,
                                             [&](std::uint32_t rank) {
                                               return std::min(c.shape.micro_batches,
                                                               hop * (c.shape.ranks - 1 - rank) + 1);
                                             }))
          << c.told;
    });
  }
}

TEST(PipelineGenerator, InterleavedIsItsFormula) {
  for (const std::uint32_t v : {1U, 2U, 3U, 4U}) {
    for_each_case("interleaved", v, 1, [&](const Case& c) {
      if (c.shape.micro_batches % c.shape.ranks != 0) return;
      EXPECT_EQ(c.cost.makespan_seconds, (c.m() * v + c.s() - 1) * c.times.all()) << c.told;
      EXPECT_EQ(in_flight(c.cost),
                each_rank(c.shape,
                          [&](std::uint32_t rank) {
                            return std::min(c.shape.micro_batches * v,
                                            2 * (c.shape.ranks - 1 - rank) + (v - 1) * c.shape.ranks + 1);
                          }))
          << c.told;
    });
  }
}

TEST(PipelineGenerator, BreadthFirstIsItsFormula) {
  for (const std::uint32_t v : {1U, 2U, 3U, 4U}) {
    for_each_case("breadth_first", v, 1, [&](const Case& c) {
      if (c.shape.micro_batches >= c.shape.ranks) {
        EXPECT_EQ(c.cost.makespan_seconds, (c.m() * v + c.s() - 1) * c.times.all()) << c.told;
      }
      EXPECT_EQ(in_flight(c.cost),
                each_rank(c.shape, [&](std::uint32_t) { return c.shape.micro_batches * v; }))
          << c.told;
    });
  }
}

TEST(PipelineGenerator, ZeroBubbleIsItsFormula) {
  for (const std::uint32_t hop : {1U, 2U}) {
    for_each_case("zero_bubble", 1, hop, [&](const Case& c) {
      const std::uint32_t depth = hop * (c.shape.ranks - 1) + 1;
      const auto& [f, i, w] = c.times;
      EXPECT_EQ(most_in_flight(c.cost), std::min(c.shape.micro_batches, depth)) << c.told;
      if (c.shape.micro_batches < depth) return;
      EXPECT_EQ(c.cost.makespan_seconds, c.m() * c.times.all() + (c.s() - 1) * std::max(f, f + i - hop * w))
          << c.told;
    });
  }
  // ZB-H1 has as many on every rank.
  for_each_case("zero_bubble", 1, 1, [&](const Case& c) {
    EXPECT_EQ(
        in_flight(c.cost),
        each_rank(c.shape, [&](std::uint32_t) { return std::min(c.shape.micro_batches, c.shape.ranks); }))
        << c.told;
  });
}

TEST(PipelineGenerator, InterleavedZeroBubbleIsItsFormula) {
  for (const std::uint32_t v : {1U, 2U, 3U}) {
    for_each_case("interleaved_zero_bubble", v, 1, [&](const Case& c) {
      if (c.shape.micro_batches % c.shape.ranks != 0) return;
      const auto& [f, i, w] = c.times;
      EXPECT_EQ(c.cost.makespan_seconds, c.m() * v * c.times.all() + (c.s() - 1) * std::max(f, f + i - w))
          << c.told;
      EXPECT_EQ(in_flight(c.cost),
                each_rank(c.shape,
                          [&](std::uint32_t) { return std::min(c.shape.micro_batches, c.shape.ranks) * v; }))
          << c.told;
    });
  }
}

/// Calls `visit` for each way to divide up to six ranks among chunks, and each number of micro-batches.
template <class Visit>
void for_each_division(const Visit& visit) {
  for (std::uint32_t ranks = 1; ranks <= 6; ++ranks) {
    for (const std::vector<std::uint32_t>& each : test::every_ranks_per_chunk(ranks)) {
      for (std::uint32_t m = *std::max_element(each.begin(), each.end()); m <= 13; ++m) visit(ranks, each, m);
    }
  }
}

TEST(PipelineGenerator, RanksOfAChunkTakeItsMicroBatchesByTurns) {
  for_each_division([](std::uint32_t ranks, const std::vector<std::uint32_t>& each, std::uint32_t m) {
    for (const auto& [name, hop] :
         {std::pair{"gpipe", 1U}, {"1f1b", 1U}, {"1f1b", 3U}, {"zero_bubble", 1U}, {"zero_bubble", 2U}}) {
      const PipelineSchedule schedule = pipeline_schedule(
          name, {.ranks = ranks, .micro_batches = m, .hops = {hop}, .ranks_per_chunk = each});
      const std::string told = schedule.json();
      EXPECT_EQ(config_error([&] { check(schedule); }), "") << told;
      EXPECT_TRUE(adds_in_order(schedule)) << told;
      EXPECT_EQ(m % schedule.rank_of.size(), 0U) << told;  // so it can be repeated
      std::uint32_t first = 0;
      for (std::uint32_t chunk = 0; chunk < each.size(); first += each[chunk++]) {
        for (std::uint32_t micro_batch = 0; micro_batch < m; ++micro_batch)
          EXPECT_EQ(schedule.rank(chunk, micro_batch), first + micro_batch % each[chunk]) << told;
      }
    }
  });
}

// 1806.03377, section 3.2: as many in flight as there are ranks from the chunk on, for each of its ranks.
TEST(PipelineGenerator, RanksOfAChunkAreAsDeepAsPipeDreamSays) {
  for_each_division([](std::uint32_t ranks, const std::vector<std::uint32_t>& each, std::uint32_t m) {
    const PipelineSchedule schedule =
        pipeline_schedule("1f1b", {.ranks = ranks, .micro_batches = m, .ranks_per_chunk = each});
    std::uint32_t rank = 0;
    for (const std::uint32_t of_chunk : each) {
      const std::uint32_t behind = ranks - rank;
      for (std::uint32_t own = 0; own < of_chunk; ++own, ++rank) {
        const std::uint32_t taken = (m - own + of_chunk - 1) / of_chunk;
        EXPECT_EQ(most_in_flight(schedule.actions[rank]), std::min(taken, (behind + of_chunk - 1) / of_chunk))
            << schedule.json();
      }
    }
  });
}

TEST(PipelineGenerator, RanksOfAChunkThatCannotBeAreRefused) {
  const auto refused = [](const char* name, std::vector<std::uint32_t> each) {
    return config_error([&] {
      pipeline_schedule(name, {.ranks = 4, .micro_batches = 3, .ranks_per_chunk = std::move(each)});
    });
  };
  EXPECT_NE(refused("1f1b", {2, 1}).find("have 3 ranks together, and there are 4"), std::string::npos);
  EXPECT_NE(refused("1f1b", {4, 0}).find("a chunk has 4 ranks, and 3 micro-batches"), std::string::npos);
  EXPECT_NE(refused("gpipe", {3, 0, 1}).find("a chunk has 0 ranks"), std::string::npos);
  for (const char* name : {"zbv", "interleaved", "chimera", "pipedream", "hetpipe", "greedy"})
    EXPECT_NE(refused(name, {2, 2}).find("take ranks_per_chunk"), std::string::npos) << name;
}

TEST(PipelineGenerator, ZbvHasNoIdleTimeBetweenARanksActionsWhereTimesAreEqual) {
  for_each_case("zbv", 2, 1, [](const Case& c) {
    for (const PipelineRankCost& rank : c.cost.ranks) {
      EXPECT_LE(rank.most_in_flight, 2 * std::min(c.shape.micro_batches, c.shape.ranks)) << c.told;
      const bool is_equal = c.times.f == c.times.i && c.times.i == c.times.w;
      if (!is_equal || c.shape.micro_batches < 2 * c.shape.ranks - 1) continue;
      EXPECT_EQ(rank.end_seconds - rank.begin_seconds, rank.busy_seconds) << c.told;
    }
  });
}

// 2405.15362, table 2: in units of a micro-batch of one rank, that is, of two chunks.
TEST(PipelineGenerator, BlocksHaveThePublishedPeaks) {
  for (std::uint32_t ranks = 2; ranks <= 32; ++ranks) {
    for (const auto& [name, micro_batches] :
         {std::pair{"v_half", (ranks + 2) / 2}, {"v_min", (ranks + 4) / 3}}) {
      const PipelineSchedule schedule = pipeline_schedule(name, {ranks, 4 * ranks});
      const PipelineCost cost = simulate(pipeline_costs(schedule.chunks(), {1, 1, 1}), schedule);
      EXPECT_EQ(most_in_flight(cost), 2 * micro_batches) << name << " " << ranks;
      const PipelineSchedule plain = pipeline_schedule("1f1b", {ranks, 4 * ranks});
      EXPECT_LT(cost.makespan_seconds, simulate(pipeline_costs(ranks, {2, 2, 2}), plain).makespan_seconds)
          << name << " " << ranks;
    }
  }
}

// 2107.06925, section 3.2, and what becomes of it where a backward pass takes twice the time.
TEST(PipelineGenerator, ChimeraIsItsFormula) {
  for (std::uint32_t ranks = 2; ranks <= 10; ranks += 2) {
    for (std::uint32_t units = 1; units <= 4; ++units) {
      const PipelineSchedule schedule = pipeline_schedule("chimera", {ranks, ranks * units});
      const auto bubble = [&](const Times& times) {
        return simulate(pipeline_costs(ranks, times), schedule).makespan_seconds -
               ranks * units * times.all();
      };
      EXPECT_EQ(bubble({1, 1, 0}), ranks - 2) << ranks << " " << units;
      EXPECT_EQ(bubble({1, 1, 1}), (ranks - 2) * (units + 1)) << ranks << " " << units;
    }
  }
}

TEST(PipelineGenerator, DualPipeIsItsFormula) {
  for_each_case("dualpipe", 1, 1, [](const Case& c) {
    const auto& [f, i, w] = c.times;
    EXPECT_LE(most_in_flight(c.cost), c.shape.ranks + 1) << c.told;
    if (w > f) return;  // W that wait are then more than fill the gaps
    EXPECT_EQ(c.cost.makespan_seconds, c.m() * c.times.all() + (c.s() / 2 - 1) * (f + i - w)) << c.told;
  });
  for_each_case("dualpipev", 2, 1,
                [](const Case& c) { EXPECT_LE(most_in_flight(c.cost), 2 * c.shape.ranks + 1) << c.told; });
}

// Where there are no more micro-batches than ranks, the phases of ZB-V are not filled, and a list is better.
TEST(PipelineGenerator, GreedyIsBetterThanZbvForFewMicroBatches) {
  for (const auto& [ranks, greedy_seconds, zbv_seconds] :
       std::vector<std::tuple<std::uint32_t, double, double>>{{4, 27, 30}, {8, 55, 62}}) {
    const PipelineCosts costs = pipeline_costs(2 * ranks, {1, 1, 1});
    EXPECT_EQ(simulate(costs, pipeline_schedule("greedy", {ranks, ranks, 2})).makespan_seconds,
              greedy_seconds);
    EXPECT_EQ(simulate(costs, pipeline_schedule("zbv", {ranks, ranks})).makespan_seconds, zbv_seconds);
  }
}

TEST(PipelineGenerator, GreedyKeepsToWhatRanksMayHaveInFlight) {
  std::mt19937_64 random(3);
  const auto draw = [&](std::uint32_t least, std::uint32_t most) {
    return least + static_cast<std::uint32_t>(random() % (most - least + 1));
  };
  for (int i = 0; i < 200; ++i) {
    const std::uint32_t ranks = draw(1, 6), v = draw(1, 3), micro_batches = draw(1, 12);
    const bool splits = draw(0, 1) == 1;
    PipelineCosts costs;
    for (std::uint32_t chunk = 0; chunk < ranks * v; ++chunk) {
      PipelineChunkCost cost;
      cost.forward_seconds = draw(1, 9);
      cost.input_seconds = draw(1, 9);
      cost.weight_seconds = draw(0, 9);
      costs.chunks.push_back(cost);
    }
    costs.links = {{1.0 * draw(0, 9), 1, 1.0 * draw(0, 9)}};
    std::vector<std::uint32_t> rank_of, most;
    for (std::uint32_t chunk = 0; chunk < ranks * v; ++chunk) rank_of.push_back(chunk % ranks);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) most.push_back(v + draw(0, 2 * ranks));
    PipelineSchedule schedule;
    const std::string error =
        config_error([&] { schedule = greedy_pipeline(costs, {rank_of}, micro_batches, most, splits); });
    ASSERT_EQ(error, "");
    EXPECT_TRUE(adds_in_order(schedule));
    const std::vector<std::uint32_t> peaks = in_flight(simulate(costs, schedule));
    for (std::uint32_t rank = 0; rank < ranks; ++rank) EXPECT_LE(peaks[rank], most[rank]) << schedule.text();
  }
  const PipelineCosts costs = pipeline_costs(4, {1, 1, 1});
  const auto refused = [&](std::vector<std::uint32_t> most) {
    return config_error([&] { greedy_pipeline(costs, {{0, 1, 0, 1}}, 4, most, true); });
  };
  EXPECT_NE(refused({2, 1}).find("at least one for each of its chunks"), std::string::npos);
  EXPECT_NE(refused({2}).find("a chunk is on rank 1"), std::string::npos);
}

// The least makespan of any schedule with a barrier: of one whose backward passes are whole, and of one that
// splits them.
double least_seconds(double micro_batches, const Times& times, const std::vector<double>& links,
                     bool splits) {
  double seconds = micro_batches * times.all();
  for (const double link : links) seconds += times.f + link + (splits ? 0 : times.i + times.w + link);
  return seconds;
}

TEST(PipelineGenerator, HopsByTheRuleHideLinks) {
  for (const std::uint32_t ranks : {2U, 4U, 8U}) {
    for (const double link : {0.0, 1.0, 2.0, 3.0, 4.0, 6.0}) {
      const Times times{2, 2, 2};
      const std::vector<double> links(ranks - 1, link);
      for (const bool splits : {false, true}) {
        if (splits && link > 2 * times.f) continue;  // there is no W left to fill the first ranks' time with
        const std::vector<std::uint32_t> hops = hops_for(links, times.f, times.i + times.w, splits);
        const std::uint32_t depth = std::accumulate(hops.begin(), hops.end(), 1U);
        for (const std::uint32_t micro_batches : {2 * depth, 3 * depth + 1}) {
          PipelineCosts costs = pipeline_costs(ranks, times);
          costs.links = {test::occupied_for(link)};
          const PipelineShape shape{ranks, micro_batches, 1, hops};
          const PipelineCost cost =
              simulate(costs, pipeline_schedule(splits ? "zero_bubble" : "1f1b", shape));
          EXPECT_EQ(cost.makespan_seconds, least_seconds(micro_batches, times, links, splits))
              << ranks << " " << link << " " << splits;
        }
      }
    }
  }
  EXPECT_NE(config_error([] { hops_for(std::vector<double>{-1}, 1, 1, false); }), "");
  EXPECT_NE(config_error([] { hops_for(std::vector<double>{1}, 0, 0, false); }), "");
}

}  // namespace
}  // namespace reef
