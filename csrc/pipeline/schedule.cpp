#include "reef/pipeline_schedule.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "pipeline/parcels.h"
#include "pipeline/progress.h"
#include "reef/error.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;
using std::to_string;

[[noreturn]] void refuse(const PipelineSchedule& schedule, const std::string& what) {
  throw ConfigError("PipelineSchedule '" + schedule.name + "': " + what);
}

std::string place(std::uint32_t rank, const PipelineAction& action) {
  return "action " + action.text() + " of rank " + to_string(rank);
}

/// Counts how often each chunk runs for each micro-batch, by kind.
void check_counts(const PipelineSchedule& schedule) {
  using Counts = std::array<std::uint32_t, 5>;
  std::vector<Counts> counts(std::size_t{schedule.chunks()} * schedule.micro_batches);
  bool trains = false;
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    for (const PipelineAction& action : schedule.actions[rank]) {
      const auto [kind, chunk, micro_batch] = action;
      if (chunk >= schedule.chunks() || micro_batch >= schedule.micro_batches)
        refuse(schedule, place(rank, action) + " is beyond its " + to_string(schedule.chunks()) +
                             " chunks and " + to_string(schedule.micro_batches) + " micro-batches");
      if (schedule.rank(chunk, micro_batch) != rank)
        refuse(schedule, place(rank, action) + " is of a chunk that is on rank " +
                             to_string(schedule.rank(chunk, micro_batch)) + " for this micro-batch");
      ++counts[std::size_t{chunk} * schedule.micro_batches + micro_batch][static_cast<std::size_t>(kind)];
      trains = trains || kind != Kind::kForward;
    }
  }
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto [forward, backward, input, weight, update] = counts[i];
    const bool whole = backward == 1 && input == 0 && weight == 0;
    const bool split = backward == 0 && input == 1 && weight == 1;
    const bool none = backward == 0 && input == 0 && weight == 0;
    if (forward == 1 && update <= 1 && (trains ? whole || split : none)) continue;
    refuse(schedule, "chunk " + to_string(i / schedule.micro_batches) + " runs " + to_string(forward) +
                         " F, " + to_string(backward) + " B, " + to_string(input) + " I, " +
                         to_string(weight) + " W and " + to_string(update) + " U for micro-batch " +
                         to_string(i % schedule.micro_batches) +
                         "; give one F, and one B or one I and one W (or F alone, for all)");
  }
}

}  // namespace

std::string PipelineSchedule::text() const {
  std::string lines;
  for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
    lines += "rank " + to_string(rank) + ":";
    for (const PipelineAction& action : actions[rank]) lines += " " + action.text();
    lines += "\n";
  }
  return lines;
}

void check_placement(const PipelineSchedule& schedule) {
  if (schedule.ranks() == 0 || schedule.micro_batches == 0 || schedule.chunks() == 0)
    refuse(schedule, "it has no rank, no chunk or no micro-batch; give at least one of each");
  for (const std::vector<std::uint32_t>& ranks : schedule.rank_of) {
    if (ranks.size() != schedule.chunks())
      refuse(schedule, "its directions have " + to_string(schedule.chunks()) + " and " +
                           to_string(ranks.size()) +
                           " chunks; each direction runs the whole model, so give as many");
    for (const std::uint32_t rank : ranks) {
      if (rank >= schedule.ranks())
        refuse(schedule, "a chunk is on rank " + to_string(rank) + ", but there are actions of " +
                             to_string(schedule.ranks()) + " ranks only");
    }
  }
}

void check_actions(const PipelineSchedule& schedule) {
  check_placement(schedule);
  check_counts(schedule);
}

void check_all_ran(const PipelineSchedule& schedule, const std::vector<std::size_t>& ran) {
  std::string waiting;
  for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
    if (ran[rank] == schedule.actions[rank].size()) continue;
    waiting += (waiting.empty() ? "" : ", ") + place(rank, schedule.actions[rank][ran[rank]]);
  }
  if (!waiting.empty()) refuse(schedule, "ranks would wait for each other for ever, at " + waiting);
}

void check(const PipelineSchedule& schedule) {
  check_actions(schedule);
  visit_as_ranks_run(schedule, [](std::uint32_t, std::size_t) {});
}

const char* pass_of(Kind kind) {
  switch (kind) {
    case Kind::kForward:
      return "forward pass";
    case Kind::kInput:
      return "backward pass to the inputs";
    case Kind::kWeight:
      return "backward pass to the weights";
    default:
      return "backward pass";
  }
}

bool adds_in_order(const PipelineSchedule& schedule) {
  for (const std::vector<PipelineAction>& actions : schedule.actions) {
    std::map<std::uint32_t, std::uint32_t> next;  // of each chunk
    for (const auto& [kind, chunk, micro_batch] : actions) {
      if (!makes_weight_gradients(kind)) continue;
      std::uint32_t& least = next[chunk];
      if (micro_batch < least) return false;
      least = micro_batch + 1;
    }
  }
  return true;
}

std::vector<PipelineMessage> pipeline_messages(const PipelineSchedule& schedule,
                                               const std::vector<PipelineSkip>& skips) {
  const PipelineParcels parcels(schedule.chunks(), skips);
  std::vector<PipelineMessage> all;
  for (const std::vector<PipelineAction>& actions : schedule.actions) {
    for (const PipelineAction& action : actions) {
      for (const PipelineParcel& parcel : parcels.made_by(action)) {
        const PipelineMessage message = message_of(schedule, action, parcel);
        if (message.to != message.from) all.push_back(message);
      }
    }
  }
  return all;
}

bool receives_in_order(const PipelineSchedule& schedule) {
  // When a rank needs the output of a chunk, or a gradient: the place of the action in its list.
  const auto needed_at = [&](const PipelineMessage& message) {
    const bool output = message.kind == PipelineMessage::Kind::kOutput;
    const std::vector<PipelineAction>& actions = schedule.actions[message.to];
    return std::find_if(actions.begin(), actions.end(), [&](const PipelineAction& action) {
      const bool forward = action.kind == Kind::kForward;
      return action.chunk == message.to_chunk && action.micro_batch == message.micro_batch &&
             forward == output;
    });
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::ptrdiff_t> last;
  for (const PipelineMessage& message : pipeline_messages(schedule)) {
    const std::ptrdiff_t place = needed_at(message) - schedule.actions[message.to].begin();
    const auto [found, first] = last.try_emplace({message.from, message.to}, place);
    if (!first && place < found->second) return false;
    found->second = place;
  }
  return true;
}

void append(const PipelineSchedule& more, PipelineSchedule& to) {
  for (std::uint32_t rank = 0; rank < more.ranks(); ++rank) {
    for (PipelineAction action : more.actions[rank]) {
      action.micro_batch += to.micro_batches;
      to.actions[rank].push_back(action);
    }
  }
  to.micro_batches += more.micro_batches;
}

PipelineSchedule repeated(const PipelineSchedule& schedule, std::uint32_t batches) {
  if (batches == 0 || schedule.micro_batches % schedule.rank_of.size() != 0)
    refuse(schedule, "it can be repeated once or more, if its micro-batches are as many in each direction");
  if (schedule.micro_batches > std::numeric_limits<std::uint32_t>::max() / batches)
    refuse(schedule, to_string(batches) + " batches have more micro-batches than can be numbered");
  PipelineSchedule all = schedule;
  for (std::uint32_t batch = 1; batch < batches; ++batch) append(schedule, all);
  return all;
}

PipelineSchedule with_updates(PipelineSchedule schedule, std::uint32_t micro_batches) {
  if (micro_batches == 0) refuse(schedule, "an update is of at least one micro-batch");
  for (std::vector<PipelineAction>& actions : schedule.actions) {
    std::vector<PipelineAction> updated;
    for (const PipelineAction& action : actions) {
      updated.push_back(action);
      if (makes_weight_gradients(action.kind) && (action.micro_batch + 1) % micro_batches == 0)
        updated.push_back({Kind::kUpdate, action.chunk, action.micro_batch});
    }
    actions = std::move(updated);
  }
  return schedule;
}

}  // namespace reef
