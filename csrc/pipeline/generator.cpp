#include "reef/pipeline_generator.h"

#include <algorithm>
#include <cmath>

#include "pipeline/generators.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

bool any_shape(const PipelineShape&) { return true; }

/// What a row of the table takes, besides at least one rank and one micro-batch.
struct Row {
  PipelineGenerator generator;
  std::uint32_t least_chunks_per_rank = 1;
  std::uint32_t most_chunks_per_rank = 1;
  bool (*takes)(const PipelineShape& shape) = &any_shape;
  bool takes_ranks_per_chunk = false;
};

constexpr std::uint32_t kAnyNumber = 1U << 16;
bool even_ranks(const PipelineShape& shape) { return shape.ranks % 2 == 0; }
bool two_for_each_rank(const PipelineShape& shape) { return shape.micro_batches >= 2 * shape.ranks; }
bool even_and_two_for_each_rank(const PipelineShape& shape) {
  return even_ranks(shape) && shape.micro_batches % 2 == 0 && two_for_each_rank(shape);
}

constexpr const char* kTwoForEach = "at least two micro-batches for each rank";

constexpr Row kRows[] = {
    {{"gpipe", "GPipe, 1811.06965", "", true, false, &gpipe}, 1, 1, &any_shape, true},
    {{"1f1b", "PipeDream-flush, 2006.09503; DAPPLE, 2007.01045", "", true, false, &one_f_one_b},
     1,
     1,
     &any_shape,
     true},
    {{"interleaved", "Megatron-LM, 2104.04473, section 2.2", "", true, false, &interleaved}, 1, kAnyNumber},
    {{"breadth_first", "2211.05953, section 4", "", true, false, &breadth_first}, 1, kAnyNumber},
    {{"zero_bubble", "2401.10241, section 2", "", true, true, &zero_bubble}, 1, 1, &any_shape, true},
    {{"interleaved_zero_bubble", "2401.10241, in the order of 2104.04473", "", true, true,
      &interleaved_zero_bubble},
     1,
     kAnyNumber},
    {{"zbv", "2401.10241, section 6", "", true, true, &zbv}, 2, 2},
    {{"v_half", "2405.15362, section 3", "", true, true, &v_half}, 2, 2},
    {{"v_min", "2405.15362, section 3", "", true, true, &v_min}, 2, 2},
    {{"chimera", "2107.06925, section 3.1", "an even number of ranks", true, false, &chimera},
     1,
     1,
     &even_ranks},
    {{"dualpipe", "DeepSeek-V3, 2412.19437, section 3.2.1",
      "an even number of ranks, and an even number of micro-batches, at least two for each rank", true, true,
      &dualpipe},
     1,
     1,
     &even_and_two_for_each_rank},
    {{"dualpipev", "DualPipe cut in half (deepseek-ai/DualPipe)", kTwoForEach, true, true, &dualpipev},
     2,
     2,
     &two_for_each_rank},
    {{"greedy", "list scheduling where all passes take as long; see greedy_pipeline()", "", true, true,
      &greedy},
     1,
     kAnyNumber},
    {{"pipedream", "1806.03377, section 3.3: weight stashing", "", false, false, &pipedream}},
    {{"pipedream_vertical", "1806.03377, section 3.3: vertical sync", "", false, false, &pipedream_vertical}},
    {{"pipedream_2bw", "2006.09503, section 3.1", "", false, false, &pipedream_2bw}},
    {{"pipemare", "1910.05124, section 2", "", false, false, &pipemare}},
    {{"hetpipe", "2005.14038, section 5", "", false, false, &hetpipe}},
};

const Row& row_of(std::string_view name) {
  std::string names;
  for (const Row& row : kRows) {
    if (row.generator.name == name) return row;
    names += (names.empty() ? "" : ", ") + std::string(row.generator.name);
  }
  throw ConfigError("'" + std::string(name) + "' is no pipeline schedule; use one of " + names);
}

/// Forward passes that a schedule may list. Its actions then take a few gigabytes.
constexpr std::uint32_t kMostPasses = 100'000'000;

[[noreturn]] void refuse(const Row& row, const std::string& what) {
  throw ConfigError("pipeline schedule '" + std::string(row.generator.name) + "': " + what);
}

/// The number of chunks of a schedule that has one for each rank, and of ranks for the others.
std::size_t places_of(const PipelineShape& shape) {
  return shape.ranks_per_chunk.empty() ? shape.ranks : shape.ranks_per_chunk.size();
}

void check_ranks_per_chunk(const Row& row, const PipelineShape& shape) {
  const std::vector<std::uint32_t>& each = shape.ranks_per_chunk;
  if (each.empty()) return;
  if (!row.takes_ranks_per_chunk)
    refuse(row,
           "a chunk has one rank in each direction; 'gpipe', '1f1b' and 'zero_bubble' take "
           "ranks_per_chunk");
  std::uint64_t all = 0;
  for (const std::uint32_t ranks : each) {
    if (ranks == 0 || ranks > shape.micro_batches)
      refuse(row, "a chunk has " + to_string(ranks) + " ranks, and " + to_string(shape.micro_batches) +
                      " micro-batches are given to them by turns; give each rank one at least");
    all += ranks;
  }
  if (all != shape.ranks)
    refuse(row,
           "its chunks have " + to_string(all) + " ranks together, and there are " + to_string(shape.ranks));
}

void check_shape(const Row& row, const PipelineShape& shape) {
  if (shape.ranks == 0 || shape.micro_batches == 0)
    refuse(row, "there is no rank, or no micro-batch; give at least one of each");
  if (shape.chunks_per_rank < row.least_chunks_per_rank || shape.chunks_per_rank > row.most_chunks_per_rank)
    refuse(row, "each rank has " + to_string(row.least_chunks_per_rank) +
                    (row.most_chunks_per_rank > row.least_chunks_per_rank ? " or more" : "") +
                    " chunks of the model, not " + to_string(shape.chunks_per_rank));
  if (1.0 * shape.ranks * shape.chunks_per_rank * shape.micro_batches > kMostPasses)
    refuse(row, "it lists the passes of all ranks, " + to_string(kMostPasses) + " at most, and there are " +
                    to_string(shape.ranks) + " ranks with " + to_string(shape.chunks_per_rank) +
                    " chunks and " + to_string(shape.micro_batches) +
                    " micro-batches; give fewer micro-batches");
  if (!row.takes(shape))
    refuse(row, "it takes " + std::string(row.generator.takes) + ", and these are " + to_string(shape.ranks) +
                    " ranks and " + to_string(shape.micro_batches) + " micro-batches");
  check_ranks_per_chunk(row, shape);
  if (shape.hops.size() + 1 != places_of(shape) || std::count(shape.hops.begin(), shape.hops.end(), 0U) > 0)
    refuse(row, "hops are whole numbers from 1, one for each rank (or chunk of several ranks) but the last");
}

PipelineShape completed(const Row& row, PipelineShape shape) {
  if (shape.chunks_per_rank == 0) shape.chunks_per_rank = row.least_chunks_per_rank;
  if (shape.hops.size() <= 1 && places_of(shape) > 0) {
    const std::uint32_t every = shape.hops.empty() ? 1 : shape.hops.front();
    shape.hops.assign(places_of(shape) - 1, every);
  }
  return shape;
}

}  // namespace

bool takes(std::string_view name, const PipelineShape& shape) { return row_of(name).takes(shape); }
bool takes_ranks_per_chunk(std::string_view name) { return row_of(name).takes_ranks_per_chunk; }

std::span<const PipelineGenerator> pipeline_generators() {
  static const std::vector<PipelineGenerator> all = [] {
    std::vector<PipelineGenerator> generators;
    for (const Row& row : kRows) generators.push_back(row.generator);
    return generators;
  }();
  return all;
}

PipelineSchedule pipeline_schedule(std::string_view name, const PipelineShape& shape) {
  const Row& row = row_of(name);
  const PipelineShape whole = completed(row, shape);
  check_shape(row, whole);
  PipelineSchedule schedule = row.generator.generate(whole);
  schedule.name = name;
  return schedule;
}

std::vector<std::uint32_t> hops_for(std::span<const double> message_seconds, double forward_seconds,
                                    double backward_seconds, bool splits) {
  const double seconds = forward_seconds + backward_seconds;
  if (!(forward_seconds >= 0 && backward_seconds >= 0 && seconds > 0 && std::isfinite(seconds)))
    throw ConfigError("hops_for: a rank computes for more than 0 seconds a micro-batch, not for " +
                      to_string(forward_seconds) + " and " + to_string(backward_seconds));
  std::vector<std::uint32_t> hops;
  for (const double message : message_seconds) {
    if (!(message >= 0 && message / seconds < 1e9))
      throw ConfigError("hops_for: a message takes " + to_string(message) +
                        " s; give 0 or more, and a finite number");
    const double round_trip = 2 * message / seconds;  // in micro-batches
    const double more = splits && message > 0 ? std::floor(round_trip) + 1 : std::ceil(round_trip);
    hops.push_back(1 + static_cast<std::uint32_t>(more));
  }
  return hops;
}

}  // namespace reef
