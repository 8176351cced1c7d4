#include "pipeline/traffic.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "reef/error.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;
using std::to_string;

bool is_gradient(Kind kind) { return kind == Kind::kBackward || kind == Kind::kInput; }

[[noreturn]] void refuse(const std::string& what) { throw ConfigError("PipelineCosts: " + what); }

void check_seconds(double seconds, const std::string& what) {
  if (!(seconds >= 0 && std::isfinite(seconds)))
    refuse(what + " take " + to_string(seconds) + " s; give 0 or more, and a finite number");
}

}  // namespace

void check_costs(const PipelineCosts& costs, const PipelineSchedule& schedule) {
  if (costs.chunks.size() != schedule.chunks())
    refuse("they are of " + to_string(costs.chunks.size()) + " chunks, and schedule '" + schedule.name +
           "' has " + to_string(schedule.chunks()));
  const std::size_t ranks = schedule.ranks();
  if (!costs.speeds.empty() && costs.speeds.size() != ranks)
    refuse("there are " + to_string(costs.speeds.size()) + " speeds for " + to_string(ranks) + " ranks");
  if (costs.links.size() > 1 && costs.links.size() != ranks * ranks)
    refuse("there are " + to_string(costs.links.size()) + " links between " + to_string(ranks) +
           " ranks; give none, one, or one for each pair");
  for (std::size_t chunk = 0; chunk < costs.chunks.size(); ++chunk) {
    const PipelineChunkCost& cost = costs.chunks[chunk];
    for (const double seconds : {cost.forward_seconds, cost.input_seconds, cost.weight_seconds})
      check_seconds(seconds, "passes of chunk " + to_string(chunk));
    if (cost.kept_after_input_bytes > cost.kept_bytes)
      refuse("chunk " + to_string(chunk) + " keeps more after I than before");
  }
  for (std::size_t rank = 0; rank < costs.speeds.size(); ++rank) {
    if (!(costs.speeds[rank] > 0 && std::isfinite(costs.speeds[rank])))
      refuse("rank " + to_string(rank) + " has a speed of " + to_string(costs.speeds[rank]) +
             "; give more than 0");
  }
  for (std::size_t i = 0; i < costs.links.size(); ++i) {
    const bool is_own = costs.links.size() > 1 && i / ranks == i % ranks;  // never used
    if (!is_own) check_link(costs.links[i]);
  }
}

double action_seconds(const PipelineCosts& costs, const PipelineAction& action, std::uint32_t rank) {
  const PipelineChunkCost& cost = costs.chunks[action.chunk];
  double seconds = 0;
  switch (action.kind) {
    case Kind::kForward:
      seconds = cost.forward_seconds;
      break;
    case Kind::kBackward:
      seconds = cost.input_seconds + cost.weight_seconds;
      break;
    case Kind::kInput:
      seconds = cost.input_seconds;
      break;
    case Kind::kWeight:
      seconds = cost.weight_seconds;
      break;
    case Kind::kUpdate:
      break;
  }
  return seconds / (costs.speeds.empty() ? 1 : costs.speeds[rank]);
}

PipelineTraffic::PipelineTraffic(const PipelineCosts& costs, const PipelineSchedule& schedule)
    : costs_(costs),
      schedule_(schedule),
      output_(std::size_t{schedule.chunks()} * schedule.micro_batches),
      gradient_(output_.size()),
      link_free_(std::size_t{schedule.ranks()} * schedule.ranks()),
      changes_(schedule.ranks()) {}

double PipelineTraffic::ready_seconds(const PipelineAction& action) const {
  const auto [kind, chunk, micro_batch] = action;
  if (kind == Kind::kForward) return chunk == 0 ? 0 : output_[at(chunk - 1, micro_batch)];
  if (!is_gradient(kind) || chunk + 1 == schedule_.chunks()) return 0;
  return gradient_[at(chunk + 1, micro_batch)];
}

void PipelineTraffic::made(const PipelineAction& action, std::uint32_t rank, double end_seconds) {
  const auto [kind, chunk, micro_batch] = action;
  const bool forward = kind == Kind::kForward;
  if (forward ? chunk + 1 == schedule_.chunks() : !is_gradient(kind) || chunk == 0) return;
  const std::uint32_t to = schedule_.rank(forward ? chunk + 1 : chunk - 1, micro_batch);
  const std::uint64_t bytes = costs_.chunks[forward ? chunk : chunk - 1].output_bytes;
  double& arrival = (forward ? output_ : gradient_)[at(chunk, micro_batch)];
  arrival = to == rank ? end_seconds : send(rank, to, bytes, end_seconds);
}

std::vector<MemoryChange> PipelineTraffic::changes(std::uint32_t rank) {
  std::sort(changes_[rank].begin(), changes_[rank].end());
  return std::move(changes_[rank]);
}

double PipelineTraffic::send(std::uint32_t from, std::uint32_t to, std::uint64_t bytes, double seconds) {
  const std::size_t pair = std::size_t{from} * schedule_.ranks() + to;
  double sent = seconds, arrival = seconds;
  if (!costs_.links.empty()) {
    const Link& link = costs_.links[costs_.links.size() == 1 ? 0 : pair];
    sent = std::max(link_free_[pair], seconds) + link.message_seconds +
           static_cast<double>(bytes) / link.bytes_per_second;
    link_free_[pair] = sent;
    arrival = sent + link.latency_seconds;
  }
  changes_[from].push_back({sent, -static_cast<std::int64_t>(bytes)});
  changes_[to].push_back({arrival, static_cast<std::int64_t>(bytes)});
  ++messages_;
  message_bytes_ += bytes;
  return arrival;
}

}  // namespace reef
