#include "distributed/group_use.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fork.h"

namespace reef {
namespace {

struct GroupsInUse {
  MutexAtFork mutex{AtFork::Order::kTables};
  std::map<const c10d::ProcessGroup*, std::weak_ptr<GroupUse>> groups;
};
GroupsInUse& in_use() {
  static auto* const all = new GroupsInUse;  // alive in destructors of statics, too
  return *all;
}

}  // namespace

std::shared_ptr<GroupUse> GroupUse::of(const ProcessGroupPtr& group) {
  const std::lock_guard lock(in_use().mutex);
  std::weak_ptr<GroupUse>& known = in_use().groups[group.get()];
  auto use = known.lock();
  if (!use) known = use = std::make_shared<GroupUse>(group);
  return use;
}

GroupUse::~GroupUse() {
  const std::lock_guard lock(in_use().mutex);
  const auto known = in_use().groups.find(group.get());
  if (known != in_use().groups.end() && known->second.expired()) in_use().groups.erase(known);
}

}  // namespace reef
