#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pipeline/parcels.h"
#include "reef/pipeline_simulation.h"

namespace reef {

/// Throws ConfigError for costs of another number of ranks, and for those that are no numbers to add up.
void check_costs(const PipelineCosts& costs, std::size_t ranks);
/// Throws ConfigError for the same, and for costs of another number of chunks than the schedule's.
void check_costs(const PipelineCosts& costs, const PipelineSchedule& schedule);

/// Returns the link from one rank to another of PipelineCosts::links; nothing if links take no time.
const Link* link_between(const std::vector<Link>& links, std::size_t ranks, std::uint32_t from,
                         std::uint32_t to);
/// Gives how long a message occupies a link.
inline double occupied_seconds(const Link& link, std::uint64_t bytes) {
  return link.message_seconds + static_cast<double>(bytes) / link.bytes_per_second;
}
/// Gives how long a message takes by itself.
inline double message_seconds(const Link* link, std::uint64_t bytes) {
  return link == nullptr ? 0 : occupied_seconds(*link, bytes) + link->latency_seconds;
}

/// Gives how long a rank is busy with adding up gradients with the others of `ranks`, which have the same
/// chunk: it sends a part of as many bytes as each has to add up to every one of them, and a sum comes back.
double reduction_seconds(const std::vector<Link>& links, std::size_t all_ranks,
                         std::span<const std::uint32_t> ranks, std::uint32_t rank,
                         std::uint64_t gradient_bytes);

/// Gives how long an action runs on a rank.
double action_seconds(const PipelineCosts& costs, const PipelineAction& action, std::uint32_t rank);

/// What comes to a rank's memory or leaves it beside the rank's actions.
struct MemoryChange {
  double seconds = 0;
  std::int64_t bytes = 0;

  friend bool operator<(const MemoryChange& a, const MemoryChange& b) {
    return std::pair(a.seconds, a.bytes) < std::pair(b.seconds, b.bytes);
  }
};

/// From each other rank so many messages are received into memory that is there before they come, if they are
/// not larger than this.
inline constexpr std::uint64_t kReceivesAhead = 2, kLargestAheadBytes = std::uint64_t{16} << 20;

/// When outputs and gradients are on the ranks that need them, in virtual time. Of the schedule, only the
/// placement and the number of micro-batches are used.
class PipelineTraffic {
 public:
  PipelineTraffic(const PipelineCosts& costs, const PipelineSchedule& schedule);

  /// Gives the time at which what an action needs from other chunks is on its rank. What makes it has to be
  /// given to made() before.
  double ready_seconds(const PipelineAction& action) const;
  /// Sends what an action has made to the ranks that need it.
  void made(const PipelineAction& action, double end_seconds);
  /// Gives the bytes of what an action makes for other chunks, and of what it needs of them.
  std::uint64_t made_bytes(const PipelineAction& action) const;
  std::uint64_t needed_bytes(const PipelineAction& action) const;

  std::uint64_t messages() const { return messages_; }
  std::uint64_t message_bytes() const { return message_bytes_; }
  /// Gives what a rank has ready for messages that have not come: as for the largest of each sender.
  std::uint64_t ahead_bytes(std::uint32_t rank) const;
  /// Gives what messages do to a rank's memory, in the order of time.
  std::vector<MemoryChange> changes(std::uint32_t rank);

 private:
  std::uint64_t bytes_of(const PipelineParcel& parcel) const;
  /// Returns when the message is there.
  double send(std::uint32_t from, std::uint32_t to, std::uint64_t bytes, double seconds);
  std::size_t at(std::uint32_t chunk, std::uint32_t micro_batch) const {
    return std::size_t{chunk} * schedule_.micro_batches + micro_batch;
  }

  const PipelineCosts& costs_;
  const PipelineSchedule& schedule_;
  PipelineParcels parcels_;
  std::vector<double> forward_, backward_;          ///< when what a pass of a chunk needs is there
  std::vector<double> link_free_;                   ///< of each pair of ranks, when its link is free again
  std::vector<std::uint64_t> largest_;              ///< message of each pair of ranks
  std::vector<std::vector<MemoryChange>> changes_;  ///< of each rank
  std::uint64_t messages_ = 0, message_bytes_ = 0;
};

}  // namespace reef
