#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/comm_lane.h"
#include "distributed/group_tags.h"
#include "distributed/slice_exchange.h"
#include "reef/local_updates.h"
#include "shard/outer_part.h"
#include "shard/outer_schedule.h"
#include "shard/shard_parts.h"
#include "shard/together.h"

namespace reef {

/// What LocalUpdates is: the parts, and what of the schedule has been carried out.
struct LocalUpdates::Rounds {
  Rounds(Shard& shard, Shard::Parts& all, const LocalUpdatesOptions& given);
  ~Rounds();
  Rounds(const Rounds&) = delete;
  Rounds& operator=(const Rounds&) = delete;

  void take_step();
  void finish();
  void begin_round();
  OptimizerState state() const;
  void load_state(const OptimizerState& own);

  /// Calls it with ranks that must agree, and says whether these are the ones that exchange; throws
  /// ConfigError on all of them if it fails on any.
  void agree(const std::function<void(Together& together, bool exchange)>& what) const;
  void check_new() const;
  void check_no_update() const;
  /// What must be the same on all ranks, and in a state.
  std::string text() const;
  std::vector<std::string> lines() const;
  void note(const std::string& call) const;
  void expect_writes() const;
  /// Since the part's last outer step, or ranks have kept some of their own.
  bool stepped(std::size_t part) const;
  void begin(std::size_t part);
  void apply(std::size_t part, double mixing);
  void check_same_step();
  void drop_travelling();

  Shard::Parts& parts;
  const LocalUpdatesOptions options;
  const OuterRule rule;
  const ProcessGroupPtr group;
  const OuterSchedule schedule;
  GroupTags tags;
  std::string name;  ///< of its calls
  std::optional<Shard::LocalSums> local;
  std::int64_t step = 0;
  std::vector<std::unique_ptr<OuterPart>> outer;
  std::optional<SliceExchange> said;  ///< for what ranks tell each other
  std::unique_ptr<CommLane> lane;     ///< the last: its work uses the others
};

}  // namespace reef
