#pragma once

#include <bitset>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "distributed/message_queue.h"
#include "distributed/tag_space.h"
#include "reef/collectives.h"

namespace c10d {
class Work;
}  // namespace c10d

namespace reef {

/// What Reef has in use of a group, whoever made it. Exists, and keeps the group, while something is.
struct GroupUse {
  static std::shared_ptr<GroupUse> of(const ProcessGroupPtr& group);
  explicit GroupUse(ProcessGroupPtr of_group) : group(std::move(of_group)) {}
  ~GroupUse();
  GroupUse(const GroupUse&) = delete;
  GroupUse& operator=(const GroupUse&) = delete;

  /// As work->wait(), of a message by gloo to or from `rank`, or until fail().
  void wait_for_message(const c10::intrusive_ptr<c10d::Work>& work, int rank);
  /// Ends all waiting for messages of this group: a rank is known to be gone.
  void fail();

  const ProcessGroupPtr group;
  std::mutex mutex;
  std::bitset<TagSpace::kNumbers> numbers;  ///< of exchanges
  std::map<int, MessageQueue> sending;      ///< by the other rank
  std::map<int, MessageQueue> receiving;
  std::multiset<c10d::Work*> waited_for;
  bool failed = false;
};

}  // namespace reef
