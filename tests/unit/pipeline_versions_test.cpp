// Which weights asynchronous pipelines use: the recurrences of the papers, from the order of actions alone.
#include "reef/pipeline_versions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "reef/pipeline_generator.h"
#include "support/config_error.h"

namespace reef {
namespace {

using test::config_error;

std::uint32_t minus(std::uint32_t count, std::uint32_t less) { return count - std::min(count, less); }
std::uint32_t ceil_of(std::uint32_t count, std::uint32_t by) { return (count + by - 1) / by; }

struct Case {
  PipelineShape shape;
  PipelineSchedule schedule;
  PipelineVersions versions;
  std::uint32_t k = 1;  ///< micro-batches for each update
  std::string told;

  std::uint32_t depth(std::uint32_t rank) const { return 1 + shape.hops.front() * (shape.ranks - 1 - rank); }
};

/// Calls `visit` with the versions of a schedule for up to 8 ranks, several depths and batches. What is
/// refused is counted, and returned.
template <class Visit>
std::size_t for_each_case(std::string_view name, const Visit& visit) {
  std::size_t refused = 0;
  for (std::uint32_t ranks = 1; ranks <= 8; ++ranks) {
    for (const std::uint32_t k : {1U, 2U, 3U, 4U, 7U, 8U, 14U, 16U}) {
      for (const std::uint32_t hop : {1U, 2U}) {
        const PipelineShape shape{ranks, 12 * k + 32, 1, {hop}, k};
        Case c{shape, {}, {}, k, {}};
        if (!config_error([&] { c.schedule = pipeline_schedule(name, shape); }).empty()) {
          ++refused;
          continue;
        }
        c.versions = pipeline_versions(c.schedule);
        c.told = std::string(name) + ", ranks " + std::to_string(ranks) + ", " + std::to_string(k) +
                 " for each update, hops " + std::to_string(hop);
        visit(c);
      }
    }
  }
  return refused;
}

TEST(PipelineVersions, StashedWeightsAreTheNewestAtTheForwardPass) {
  const std::size_t refused = for_each_case("pipedream", [](const Case& c) {
    for (std::uint32_t rank = 0; rank < c.shape.ranks; ++rank) {
      for (std::uint32_t m = 0; m < c.shape.micro_batches; ++m) {
        const std::uint32_t version = minus(m + 1, c.depth(rank)) / c.k;
        EXPECT_EQ(c.versions.of[rank][m], (PipelineVersion{version, version, 0})) << c.told << " " << m;
      }
      EXPECT_EQ(c.versions.most_alive[rank], 1 + ceil_of(c.depth(rank) - 1, c.k))
          << c.told << ", rank " << rank;
    }
  });
  EXPECT_EQ(refused, 0U);
}

TEST(PipelineVersions, VerticalSyncUsesTheVersionOfTheFirstRankOnAll) {
  for_each_case("pipedream_vertical", [](const Case& c) {
    for (std::uint32_t rank = 0; rank < c.shape.ranks; ++rank) {
      for (std::uint32_t m = 0; m < c.shape.micro_batches; ++m) {
        const std::uint32_t version = minus(m + 1, c.depth(0)) / c.k;
        EXPECT_EQ(c.versions.of[rank][m], (PipelineVersion{version, version, 0})) << c.told << " " << m;
      }
      EXPECT_LE(c.versions.most_alive[rank], 1 + ceil_of(c.depth(0), c.k)) << c.told << ", rank " << rank;
    }
  });
}

TEST(PipelineVersions, TwoBuffersAreOneUpdateBehindAndNeverThree) {
  const std::size_t refused = for_each_case("pipedream_2bw", [](const Case& c) {
    EXPECT_GE(c.k + 1, c.depth(0)) << c.told;
    for (std::uint32_t rank = 0; rank < c.shape.ranks; ++rank) {
      for (std::uint32_t m = 0; m < c.shape.micro_batches; ++m) {
        const std::uint32_t version = minus(m / c.k, 1);
        EXPECT_EQ(c.versions.of[rank][m], (PipelineVersion{version, version, 0})) << c.told << " " << m;
      }
      EXPECT_EQ(c.versions.most_alive[rank], 2U) << c.told << ", rank " << rank;
    }
  });
  EXPECT_GT(refused, 20U);  // those with too few micro-batches for their depth
}

// The same order, but with the rule of an update that is smaller than two versions allow.
TEST(PipelineVersions, AVersionThatIsNotThereIsRefused) {
  PipelineSchedule schedule = pipeline_schedule("pipedream", {4, 16, 1, {}, 2});
  schedule.versions.kind = PipelineVersionRule::Kind::kTwoBuffers;
  const std::string error = config_error([&] { pipeline_versions(schedule); });
  EXPECT_NE(
      error.find("chunk 0 needs its weights after update 1 for micro-batch 4, and has had only 0 updates"),
      std::string::npos)
      << error;
  schedule.versions.micro_batches_per_update = 0;
  EXPECT_NE(config_error([&] { pipeline_versions(schedule); }).find("at least one micro-batch"),
            std::string::npos);
  schedule = pipeline_schedule("chimera", {4, 16});
  EXPECT_EQ(pipeline_versions(schedule).of[3][15], PipelineVersion{});
  schedule.versions.kind = PipelineVersionRule::Kind::kStash;
  EXPECT_NE(config_error([&] { pipeline_versions(schedule); }).find("one direction"), std::string::npos);
}

TEST(PipelineVersions, TheNewestIsUsedAtEachPass) {
  for_each_case("pipemare", [](const Case& c) {
    for (std::uint32_t rank = 0; rank < c.shape.ranks; ++rank) {
      for (std::uint32_t m = 0; m < c.shape.micro_batches; ++m) {
        const PipelineVersion expected{minus(m + 1, c.depth(rank)) / c.k, m / c.k, 0};
        EXPECT_EQ(c.versions.of[rank][m], expected) << c.told << " " << m;
      }
      EXPECT_EQ(c.versions.most_alive[rank], 1U);
    }
  });
}

// A rank of depth D runs a forward pass D - 1 micro-batches before their gradients are there.
TEST(PipelineVersions, DelaysAreThoseOfTheDepth) {
  for_each_case("pipemare", [](const Case& c) {
    PipelineShape shape = c.shape;
    shape.micro_batches = c.k * 44;  // whole updates, and more of them than are in flight
    const std::vector<double> delays = pipeline_delays(pipeline_schedule("pipemare", shape));
    for (std::uint32_t rank = 0; rank < c.shape.ranks; ++rank)
      EXPECT_DOUBLE_EQ(delays[rank], (c.depth(rank) - 1.0) / c.k) << c.told << ", rank " << rank;
  });
  EXPECT_NE(config_error([] {
              pipeline_delays(pipeline_schedule("1f1b", {2, 4}));
            }).find("no update"),
            std::string::npos);
  const PipelineSchedule flushed = with_updates(repeated(pipeline_schedule("zbv", {3, 4}), 3), 4);
  EXPECT_EQ(std::count_if(
                flushed.actions[1].begin(), flushed.actions[1].end(),
                [](const PipelineAction& action) { return action.kind == PipelineAction::Kind::kUpdate; }),
            6);
  EXPECT_DOUBLE_EQ(pipemare_rate(4, 0, 100), 0.25);
  EXPECT_DOUBLE_EQ(pipemare_rate(4, 50, 100), 0.5);
  EXPECT_DOUBLE_EQ(pipemare_rate(4, 200, 100), 1);
  EXPECT_DOUBLE_EQ(pipemare_rate(0.25, 0, 100), 1);
  EXPECT_DOUBLE_EQ(pipemare_rate(4, 0, 0), 1);
}

TEST(PipelineVersions, SynchronousSchedulesUseTheWeightsThatThereAre) {
  for (const PipelineGenerator& generator : pipeline_generators()) {
    if (!generator.synchronous) continue;
    const PipelineVersions versions = pipeline_versions(pipeline_schedule(generator.name, {4, 8}));
    for (const std::vector<PipelineVersion>& of_chunk : versions.of)
      EXPECT_EQ(of_chunk, std::vector<PipelineVersion>(8)) << generator.name;
    EXPECT_EQ(*std::max_element(versions.most_alive.begin(), versions.most_alive.end()), 1U);
  }
}

// 2005.14038, section 5: with N = s_local + 1 micro-batches in a wave, a micro-batch lacks at most
// s_global = (D + 1)(s_local + 1) + s_local - 1 updates of each other virtual worker.
TEST(PipelineVersions, WavesAreBoundedlyStale) {
  for (const std::uint32_t wave : {4U, 5U, 9U}) {
    for (const std::uint32_t staleness : {0U, 1U, 3U}) {
      const PipelineSchedule schedule = pipeline_schedule("hetpipe", {4, 10 * wave, 1, {}, wave, staleness});
      const PipelineVersions versions = pipeline_versions(schedule);
      std::uint32_t most_missing = 0;
      for (std::uint32_t m = 0; m < schedule.micro_batches; ++m) {
        for (std::uint32_t chunk = 0; chunk < 4; ++chunk) {
          const PipelineVersion& version = versions.of[chunk][m];
          EXPECT_EQ(version.forward, minus(m + 1, wave));
          EXPECT_EQ(version.backward, version.forward);
          EXPECT_EQ(version.others_waves, minus(version.forward / wave, staleness));
          most_missing = std::max(most_missing, m - version.others_waves * wave);
        }
      }
      const std::uint32_t local = wave - 1;
      EXPECT_EQ(most_missing, (staleness + 1) * (local + 1) + local - 1);
    }
  }
  // One micro-batch in flight, and no staleness: data parallelism.
  const PipelineVersions plain = pipeline_versions(pipeline_schedule("hetpipe", {1, 6, 1, {}, 1, 0}));
  for (std::uint32_t m = 0; m < 6; ++m) EXPECT_EQ(plain.of[0][m], (PipelineVersion{m, m, m}));
}

}  // namespace
}  // namespace reef
