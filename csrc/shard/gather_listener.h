#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <memory>

#include "distributed/comm_lane.h"
#include "reef/collectives.h"

namespace reef {

/// Looks at what other ranks wait to gather while this rank's program waits in another call of all ranks (a
/// barrier, a state dict): they come to that call only when they have what they wait for.
class GatherListener {
 public:
  /// `answer`, on a thread of this one's, takes part in what the others have asked for, and says whether
  /// there was anything. Of groups without a heartbeat it is never called.
  GatherListener(c10d::ProcessGroup& group, c10::Device device, std::function<bool()> answer);
  ~GatherListener();
  GatherListener(const GatherListener&) = delete;
  GatherListener& operator=(const GatherListener&) = delete;

 private:
  void listen();

  std::function<bool()> answer_;
  std::atomic<bool> listens_{false};
  std::atomic<bool> closing_{false};
  std::unique_ptr<CommLane> lane_;
  std::shared_ptr<void> while_waiting_;
};

}  // namespace reef
