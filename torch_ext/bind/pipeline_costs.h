#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bytes.h"
#include "reef/error.h"
#include "reef/pipeline_partition.h"
#include "reef/pipeline_simulation.h"

/// How Python gives what a pipeline costs: numbers of chunks, speeds of ranks, numbers of links and of skips.
#define REEF_PIPELINE_COSTS                                                         \
  "float[][] chunk_seconds, int[][] chunk_bytes, float[] speeds, float[][] links, " \
  "int[][] skips"

namespace reef::bind {

using Ints = std::vector<std::int64_t>;
using Floats = std::vector<double>;

inline std::uint32_t small(std::int64_t value, const char* what) {
  if (value < 0 || value > std::numeric_limits<std::uint32_t>::max())
    throw ConfigError(std::string(what) + " is " + std::to_string(value) +
                      "; give 0 or more, and below 2**32");
  return static_cast<std::uint32_t>(value);
}

inline std::vector<std::uint32_t> all_small(const Ints& values, const char* what) {
  std::vector<std::uint32_t> numbers;
  for (const std::int64_t value : values) numbers.push_back(small(value, what));
  return numbers;
}

/// The fields of reef.PipelineChunkCost in their order.
inline std::vector<PipelineChunkCost> pipeline_chunks_of(const std::vector<Floats>& chunk_seconds,
                                                         const std::vector<Ints>& chunk_bytes) {
  std::vector<PipelineChunkCost> chunks;
  for (std::size_t i = 0; i < chunk_seconds.size(); ++i) {
    const Floats& seconds = chunk_seconds[i];
    const auto count = [&](std::size_t field) { return bytes_of(chunk_bytes.at(i).at(field), "a chunk"); };
    chunks.push_back({seconds.at(0), seconds.at(1), seconds.at(2), count(0), count(1), count(2), count(3),
                      count(4), count(5)});
  }
  return chunks;
}
inline Floats seconds_of(const PipelineChunkCost& chunk) {
  return {chunk.forward_seconds, chunk.input_seconds, chunk.weight_seconds};
}
inline Ints counts_of(const PipelineChunkCost& chunk) {
  Ints counts;
  for (const std::uint64_t each : {chunk.output_bytes, chunk.kept_bytes, chunk.kept_after_input_bytes,
                                   chunk.working_bytes, chunk.fixed_bytes, chunk.gradient_bytes})
    counts.push_back(static_cast<std::int64_t>(each));
  return counts;
}

/// The fields of reef.Link in their order.
inline std::vector<Link> links_of(const std::vector<Floats>& rows) {
  std::vector<Link> links;
  for (const Floats& row : rows) links.push_back({row.at(0), row.at(1), row.at(2)});
  return links;
}

/// Of each of reef.PipelineSkip: the chunk that gives, the bytes, and the chunks that take.
inline std::vector<PipelineSkip> skips_of(const std::vector<Ints>& rows) {
  std::vector<PipelineSkip> skips;
  for (const Ints& row : rows)
    skips.push_back({small(row.at(0), "a chunk that gives"),
                     all_small(Ints(row.begin() + 2, row.end()), "a chunk that takes"),
                     bytes_of(row.at(1), "a skip")});
  return skips;
}
inline std::vector<Ints> rows_of(const std::vector<PipelineSkip>& skips) {
  std::vector<Ints> rows;
  for (const PipelineSkip& skip : skips) {
    rows.push_back({skip.from, static_cast<std::int64_t>(skip.bytes)});
    rows.back().insert(rows.back().end(), skip.to.begin(), skip.to.end());
  }
  return rows;
}

/// Of runs of recomputed stages the first stage and the end, one after another.
inline RecomputedRuns runs_of(const Ints& ends) {
  RecomputedRuns runs;
  for (std::size_t i = 0; i + 1 < ends.size(); i += 2)
    runs.push_back({small(ends[i], "a recomputed stage"), small(ends[i + 1], "a recomputed stage")});
  return runs;
}
inline Ints ends_of(const RecomputedRuns& runs) {
  Ints ends;
  for (const RecomputedRun& run : runs) ends.insert(ends.end(), {run.first, run.end});
  return ends;
}

inline PipelineCosts pipeline_costs_of(const std::vector<Floats>& chunk_seconds,
                                       const std::vector<Ints>& chunk_bytes, Floats speeds,
                                       const std::vector<Floats>& links, const std::vector<Ints>& skips) {
  return {pipeline_chunks_of(chunk_seconds, chunk_bytes), std::move(speeds), links_of(links),
          skips_of(skips)};
}

/// In the order of the fields of reef.PipelineCost; of ranks, first seconds, then counts.
using PipelineCostNumbers = std::tuple<double, double, std::vector<Floats>, std::vector<Ints>, std::int64_t,
                                       std::int64_t, std::vector<Floats>, std::vector<Floats>>;
inline PipelineCostNumbers pipeline_cost_of(const PipelineCost& cost) {
  std::vector<Floats> seconds;
  std::vector<Ints> counts;
  for (const PipelineRankCost& rank : cost.ranks) {
    seconds.push_back({rank.busy_seconds, rank.begin_seconds, rank.end_seconds});
    counts.push_back({rank.most_in_flight, static_cast<std::int64_t>(rank.peak_bytes)});
  }
  return {cost.makespan_seconds,
          cost.reduction_seconds,
          std::move(seconds),
          std::move(counts),
          static_cast<std::int64_t>(cost.messages),
          static_cast<std::int64_t>(cost.message_bytes),
          cost.begin_seconds,
          cost.end_seconds};
}

}  // namespace reef::bind
