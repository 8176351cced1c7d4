#include "reef/pipeline_schedule.h"

#include <torch/library.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pipeline_costs.h"
#include "reef/error.h"
#include "reef/pipeline_generator.h"
#include "reef/pipeline_simulation.h"
#include "reef/pipeline_versions.h"

namespace {

using reef::bind::all_small;
using reef::bind::Floats;
using reef::bind::Ints;
using reef::bind::pipeline_cost_of;
using reef::bind::pipeline_costs_of;
using reef::bind::small;

reef::PipelineSchedule schedule_of(const std::string& json) {
  return reef::pipeline_schedule_from_json(json);
}

// Of each message: whether it is a gradient, then chunks, micro-batch, sender and receiver.
std::vector<Ints> messages_of(const std::string& schedule, const std::vector<Ints>& skips) {
  std::vector<Ints> messages;
  for (const reef::PipelineMessage& message :
       reef::pipeline_messages(schedule_of(schedule), reef::bind::skips_of(skips)))
    messages.push_back({message.kind == reef::PipelineMessage::Kind::kGradient, message.chunk,
                        message.to_chunk, message.micro_batch, message.from, message.to});
  return messages;
}

// Of each chunk, three numbers for each micro-batch, one after another; and the most versions that are alive.
std::tuple<std::vector<Ints>, Ints> versions_of(const std::string& schedule) {
  const reef::PipelineVersions versions = reef::pipeline_versions(schedule_of(schedule));
  std::vector<Ints> of;
  for (const std::vector<reef::PipelineVersion>& of_chunk : versions.of) {
    Ints& numbers = of.emplace_back();
    for (const reef::PipelineVersion& version : of_chunk)
      numbers.insert(numbers.end(), {version.forward, version.backward, version.others_waves});
  }
  return {std::move(of), Ints(versions.most_alive.begin(), versions.most_alive.end())};
}

// The columns of the table: names, papers, shapes, whether they are synchronous, and whether they split.
using Names = std::vector<std::string>;
std::tuple<Names, Names, Names, c10::List<bool>, c10::List<bool>> generators() {
  std::tuple<Names, Names, Names, c10::List<bool>, c10::List<bool>> columns;
  auto& [names, sources, takes, synchronous, splits] = columns;
  for (const reef::PipelineGenerator& row : reef::pipeline_generators()) {
    names.emplace_back(row.name);
    sources.emplace_back(row.source);
    takes.emplace_back(row.takes);
    synchronous.push_back(row.synchronous);
    splits.push_back(row.splits);
  }
  return columns;
}

std::string named_schedule(const std::string& name, std::int64_t ranks, std::int64_t micro_batches,
                           std::int64_t chunks_per_rank, const Ints& hops,
                           std::int64_t micro_batches_per_update, std::int64_t staleness,
                           const Ints& ranks_per_chunk) {
  return reef::pipeline_schedule(
             name, {small(ranks, "the number of ranks"), small(micro_batches, "the number of micro-batches"),
                    small(chunks_per_rank, "the number of chunks of a rank"), all_small(hops, "a hop"),
                    small(micro_batches_per_update, "the number of micro-batches of an update"),
                    small(staleness, "the staleness"), all_small(ranks_per_chunk, "the ranks of a chunk")})
      .json();
}

std::string schedule_from_block(std::int64_t period, const std::vector<Ints>& slots,
                                std::int64_t micro_batches) {
  reef::PipelineBlock block{small(period, "the period"), {}};
  for (const Ints& of_rank : slots) {
    const std::vector<std::uint32_t> numbers = all_small(of_rank, "a slot");
    if (numbers.size() != 4) throw reef::ConfigError("a block has four slots of each rank: of F, F, I and I");
    block.slots.push_back({numbers[0], numbers[1], numbers[2], numbers[3]});
  }
  return reef::pipeline_from_block(block, small(micro_batches, "the number of micro-batches")).json();
}

std::string greedy_schedule(const std::vector<Floats>& seconds, const std::vector<Ints>& bytes, Floats speeds,
                            const std::vector<Floats>& links, const std::vector<Ints>& skips,
                            const std::vector<Ints>& rank_of, std::int64_t micro_batches,
                            const Ints& most_in_flight, bool splits) {
  std::vector<std::vector<std::uint32_t>> placed;
  for (const Ints& direction : rank_of) placed.push_back(all_small(direction, "a rank"));
  return reef::greedy_pipeline(pipeline_costs_of(seconds, bytes, std::move(speeds), links, skips),
                               std::move(placed), small(micro_batches, "the number of micro-batches"),
                               all_small(most_in_flight, "what a rank has in flight"), splits)
      .json();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("pipeline_generators() -> (str[], str[], str[], bool[], bool[])", &generators);
  m.def(
      "pipeline_schedule(str name, int ranks, int micro_batches, int chunks_per_rank, int[] hops, int "
      "micro_batches_per_update, int staleness, int[] ranks_per_chunk) -> str",
      &named_schedule);
  m.def("pipeline_from_block(int period, int[][] slots, int micro_batches) -> str", &schedule_from_block);
  m.def(
      "hops_for(float[] message_seconds, float forward_seconds, float backward_seconds, bool splits) -> "
      "int[]",
      [](const Floats& message_seconds, double forward_seconds, double backward_seconds, bool splits) {
        const std::vector<std::uint32_t> hops =
            reef::hops_for(message_seconds, forward_seconds, backward_seconds, splits);
        return Ints(hops.begin(), hops.end());
      });
  m.def("greedy_pipeline(" REEF_PIPELINE_COSTS
        ", int[][] rank_of, int micro_batches, int[] most_in_flight, bool splits) -> str",
        &greedy_schedule);
  m.def("check_pipeline(str schedule) -> str",
        [](const std::string& schedule) { return schedule_of(schedule).json(); });
  m.def("pipeline_text(str schedule) -> str",
        [](const std::string& schedule) { return schedule_of(schedule).text(); });
  m.def("adds_in_order(str schedule) -> bool",
        [](const std::string& schedule) { return reef::adds_in_order(schedule_of(schedule)); });
  m.def("receives_in_order(str schedule) -> bool",
        [](const std::string& schedule) { return reef::receives_in_order(schedule_of(schedule)); });
  m.def("repeated_pipeline(str schedule, int batches) -> str",
        [](const std::string& schedule, std::int64_t batches) {
          return reef::repeated(schedule_of(schedule), small(batches, "the number of batches")).json();
        });
  m.def("pipeline_messages(str schedule, int[][] skips) -> int[][]", &messages_of);
  m.def("pipeline_versions(str schedule) -> (int[][], int[])", &versions_of);
  m.def("pipeline_delays(str schedule) -> float[]",
        [](const std::string& schedule) { return reef::pipeline_delays(schedule_of(schedule)); });
  m.def("pipemare_rate(float delay, int update, int annealing_updates) -> float",
        [](double delay, std::int64_t update, std::int64_t annealing_updates) {
          if (update < 0 || annealing_updates < 0)
            throw reef::ConfigError("pipemare_rate: updates are counted from 0");
          return reef::pipemare_rate(delay, static_cast<std::uint64_t>(update),
                                     static_cast<std::uint64_t>(annealing_updates));
        });
  m.def("simulate_pipeline(" REEF_PIPELINE_COSTS
        ", str schedule) -> (float, float, float[][], int[][], int, int, float[][], float[][])",
        [](const std::vector<Floats>& seconds, const std::vector<Ints>& bytes, Floats speeds,
           const std::vector<Floats>& links, const std::vector<Ints>& skips, const std::string& schedule) {
          return pipeline_cost_of(reef::simulate(
              pipeline_costs_of(seconds, bytes, std::move(speeds), links, skips), schedule_of(schedule)));
        });
  m.def("pipeline_period_seconds(" REEF_PIPELINE_COSTS ", str schedule) -> float",
        [](const std::vector<Floats>& seconds, const std::vector<Ints>& bytes, Floats speeds,
           const std::vector<Floats>& links, const std::vector<Ints>& skips, const std::string& schedule) {
          return reef::pipeline_period_seconds(
              pipeline_costs_of(seconds, bytes, std::move(speeds), links, skips), schedule_of(schedule));
        });
  m.def("pipeline_chart(" REEF_PIPELINE_COSTS ", str schedule, str title) -> str",
        [](const std::vector<Floats>& seconds, const std::vector<Ints>& bytes, Floats speeds,
           const std::vector<Floats>& links, const std::vector<Ints>& skips, const std::string& schedule,
           const std::string& title) {
          return reef::pipeline_chart(pipeline_costs_of(seconds, bytes, std::move(speeds), links, skips),
                                      schedule_of(schedule), title);
        });
}
