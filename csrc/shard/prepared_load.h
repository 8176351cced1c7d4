#pragma once

#include <functional>
#include <vector>

#include "reef/shard.h"

namespace reef {

/// Shard::load_state_dict() in two halves, for programs that have several shards: all can check what they are
/// given before anything has changed. All ranks of the shard alike; the shard must outlive it.
class PreparedLoad {
 public:
  /// Throws as Shard::load_state_dict() does, and has changed nothing.
  PreparedLoad(Shard& shard, const std::vector<StateDict>& given);
  void load() const { load_(); }

 private:
  std::function<void()> load_;
};

}  // namespace reef
