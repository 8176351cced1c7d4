#include "pipeline/traffic.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "pipeline/progress.h"
#include "reef/error.h"

namespace reef {
namespace {

using Kind = PipelineAction::Kind;
using std::to_string;

[[noreturn]] void refuse(const std::string& what) { throw ConfigError("PipelineCosts: " + what); }

void check_seconds(double seconds, const std::string& what) {
  if (!(seconds >= 0 && std::isfinite(seconds)))
    refuse(what + " take " + to_string(seconds) + " s; give 0 or more, and a finite number");
}

}  // namespace

void check_costs(const PipelineCosts& costs, std::size_t ranks) {
  if (!costs.speeds.empty() && costs.speeds.size() != ranks)
    refuse("there are " + to_string(costs.speeds.size()) + " speeds for " + to_string(ranks) + " ranks");
  if (costs.links.size() > 1 && costs.links.size() != ranks * ranks)
    refuse("there are " + to_string(costs.links.size()) + " links between " + to_string(ranks) +
           " ranks; give none, one, or one for each pair");
  for (std::size_t chunk = 0; chunk < costs.chunks.size(); ++chunk) {
    const PipelineChunkCost& cost = costs.chunks[chunk];
    for (const double seconds : {cost.forward_seconds, cost.input_seconds, cost.weight_seconds})
      check_seconds(seconds, "passes of chunk " + to_string(chunk));
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

void check_costs(const PipelineCosts& costs, const PipelineSchedule& schedule) {
  if (costs.chunks.size() != schedule.chunks())
    refuse("they are of " + to_string(costs.chunks.size()) + " chunks, and schedule '" + schedule.name +
           "' has " + to_string(schedule.chunks()));
  check_costs(costs, schedule.ranks());
}

const Link* link_between(const std::vector<Link>& links, std::size_t ranks, std::uint32_t from,
                         std::uint32_t to) {
  return links.empty() ? nullptr : &links[links.size() == 1 ? 0 : from * ranks + to];
}

double reduction_seconds(const std::vector<Link>& links, std::size_t all_ranks,
                         std::span<const std::uint32_t> ranks, std::uint32_t rank,
                         std::uint64_t gradient_bytes) {
  double seconds = 0;
  if (gradient_bytes == 0) return seconds;
  for (const std::uint32_t other : ranks) {
    if (other != rank)
      seconds +=
          2 * message_seconds(link_between(links, all_ranks, rank, other), gradient_bytes / ranks.size());
  }
  return seconds;
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
      parcels_(schedule.chunks(), costs.skips),
      forward_(std::size_t{schedule.chunks()} * schedule.micro_batches),
      backward_(forward_.size()),
      link_free_(std::size_t{schedule.ranks()} * schedule.ranks()),
      largest_(link_free_.size()),
      changes_(schedule.ranks()) {}

double PipelineTraffic::ready_seconds(const PipelineAction& action) const {
  if (action.kind == Kind::kForward) return forward_[at(action.chunk, action.micro_batch)];
  return makes_gradient(action.kind) ? backward_[at(action.chunk, action.micro_batch)] : 0;
}

void PipelineTraffic::made(const PipelineAction& action, double end_seconds) {
  std::vector<double>& ready = action.kind == Kind::kForward ? forward_ : backward_;
  for (const PipelineParcel& parcel : parcels_.made_by(action)) {
    const PipelineMessage message = message_of(schedule_, action, parcel);
    const double arrival = message.to == message.from
                               ? end_seconds
                               : send(message.from, message.to, bytes_of(parcel), end_seconds);
    double& all = ready[at(parcel.to, action.micro_batch)];
    all = std::max(all, arrival);
  }
}

std::uint64_t PipelineTraffic::bytes_of(const PipelineParcel& parcel) const {
  const std::uint32_t cut = std::min(parcel.from, parcel.to);  // after this chunk
  std::uint64_t bytes = parcel.is_to_next ? costs_.chunks[cut].output_bytes : 0;
  for (const std::size_t skip : parcel.skips) bytes += costs_.skips[skip].bytes;
  return bytes;
}

std::uint64_t PipelineTraffic::made_bytes(const PipelineAction& action) const {
  std::uint64_t bytes = 0;
  for (const PipelineParcel& parcel : parcels_.made_by(action)) bytes += bytes_of(parcel);
  return bytes;
}
std::uint64_t PipelineTraffic::needed_bytes(const PipelineAction& action) const {
  std::uint64_t bytes = 0;
  for (const PipelineParcel& parcel : parcels_.needed_by(action)) bytes += bytes_of(parcel);
  return bytes;
}

std::uint64_t PipelineTraffic::ahead_bytes(std::uint32_t rank) const {
  std::uint64_t bytes = 0;
  for (std::uint32_t from = 0; from < schedule_.ranks(); ++from) {
    const std::uint64_t largest = largest_[std::size_t{from} * schedule_.ranks() + rank];
    if (largest <= kLargestAheadBytes) bytes += kReceivesAhead * largest;
  }
  return bytes;
}

std::vector<MemoryChange> PipelineTraffic::changes(std::uint32_t rank) {
  std::sort(changes_[rank].begin(), changes_[rank].end());
  return std::move(changes_[rank]);
}

double PipelineTraffic::send(std::uint32_t from, std::uint32_t to, std::uint64_t bytes, double seconds) {
  double sent = seconds, arrival = seconds;
  std::uint64_t& largest = largest_[std::size_t{from} * schedule_.ranks() + to];
  largest = std::max(largest, bytes);
  if (const Link* link = link_between(costs_.links, schedule_.ranks(), from, to)) {
    double& link_free = link_free_[std::size_t{from} * schedule_.ranks() + to];
    sent = link_free = std::max(link_free, seconds) + occupied_seconds(*link, bytes);
    arrival = sent + link->latency_seconds;
  }
  changes_[from].push_back({sent, -static_cast<std::int64_t>(bytes)});
  changes_[to].push_back({arrival, static_cast<std::int64_t>(bytes)});
  ++messages_;
  message_bytes_ += bytes;
  return arrival;
}

}  // namespace reef
