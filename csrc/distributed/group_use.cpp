#include "distributed/group_use.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/connection.h"
#include "distributed/heartbeat.h"
#include "distributed/members.h"
#include "table_at_fork.h"

namespace reef {
namespace {

using GroupsInUse = TableAtFork<std::map<const c10d::ProcessGroup*, std::weak_ptr<GroupUse>>>;
GroupsInUse& in_use() {
  static auto* const all = new GroupsInUse;
  return *all;
}

}  // namespace

std::shared_ptr<GroupUse> GroupUse::of(const ProcessGroupPtr& group) {
  const auto groups = in_use().lock();
  std::weak_ptr<GroupUse>& known = (*groups)[group.get()];
  auto use = known.lock();
  if (!use) known = use = std::make_shared<GroupUse>(group);
  return use;
}

GroupUse::~GroupUse() {
  const auto groups = in_use().lock();
  const auto known = groups->find(group.get());
  if (known != groups->end() && known->second.expired()) groups->erase(known);
}

void GroupUse::wait_for_message(const c10::intrusive_ptr<c10d::Work>& work, int rank) {
  const auto refuse = [] { C10_THROW_ERROR(DistError, "another message of this group has failed"); };
  {
    const std::lock_guard lock(mutex);
    if (failed) refuse();
    waited_for.insert(work.get());
  }
  const auto over = [&] {
    const std::lock_guard lock(mutex);
    waited_for.erase(waited_for.find(work.get()));
  };
  bool arrived = false;
  try {
    Heartbeat* const heart = heart_of(*group);
    const auto gloo = group->getBackend(c10::kCPU);
    if (heart != nullptr) heart->wait_for_message(work, *gloo, rank);
    arrived = heart != nullptr || wait_connected(*work, *gloo, rank);
  } catch (...) {
    over();
    throw;
  }
  over();
  if (!arrived) refuse();
}

void GroupUse::fail() {
  if (Heartbeat* const heart = heart_of(*group)) heart->fail();
  const std::lock_guard lock(mutex);
  failed = true;
  for (auto* const work : waited_for) work->abort();
}

}  // namespace reef
