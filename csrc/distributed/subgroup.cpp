#include "reef/subgroup.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "distributed/bytes_over_ranks.h"
#include "distributed/gloo.h"
#include "distributed/identity.h"
#include "distributed/members.h"
#include "distributed/nccl.h"
#include "distributed/process.h"
#include "distributed/subgroup_apart.h"
#include "distributed/watched_store.h"
#include "reef/error.h"

namespace reef {
namespace {

using Group = c10d::ProcessGroup;

constexpr const char* kCall = "reef::subgroup";
constexpr const char* kFailed = "failed";
constexpr std::int64_t kOtherDescriptors = 8;  // that something beside it may open meanwhile
constexpr milliseconds kLookEvery{5};
constexpr milliseconds kLastLook{200};

/// Of a device that the group has one for; nullptr.
c10::intrusive_ptr<c10d::Backend> backend_of(Group& group, c10::DeviceType device) {
  const auto devices = group.getDeviceTypes();
  const bool has =
      std::any_of(devices.begin(), devices.end(), [&](const auto& each) { return each.type() == device; });
  return has ? group.getBackend(device) : nullptr;
}

bool is(const c10::intrusive_ptr<c10d::Backend>& backend, const char* name) {
  return backend && backend->getBackendName() == name;
}

// LibTorch has several of its own ("nccl", "nccl2").
bool is_nccl(const c10::intrusive_ptr<c10d::Backend>& backend) {
  return backend && backend->getBackendName().starts_with("nccl");
}

std::string list_text(c10::IntArrayRef ranks) {
  std::ostringstream out;
  out << ranks;
  return out.str();
}

/// What is wrong with the list; "".
std::string fault(c10::IntArrayRef ranks, int size) {
  if (ranks.empty()) return "no ranks";
  std::set<std::int64_t> seen;
  for (const auto rank : ranks) {
    if (rank < 0 || rank >= size) return list_text(ranks) + ", and there is no rank " + std::to_string(rank);
    if (!seen.insert(rank).second)
      return list_text(ranks) + ", in which rank " + std::to_string(rank) + " stands twice";
  }
  return "";
}

/// Every rank's text, on every rank.
std::vector<std::string> exchanged(const ProcessGroupPtr& group, const std::string& own) {
  const at::Tensor bytes =
      at::from_blob(const_cast<char*>(own.data()), {static_cast<std::int64_t>(own.size())}, at::kByte);
  std::vector<std::string> all;
  for (const auto& each :
       gather_bytes(bytes, group, backend_of(*group, c10::kCPU) ? c10::kCPU : c10::kCUDA)) {
    all.emplace_back(static_cast<const char*>(each.const_data_ptr()), static_cast<std::size_t>(each.numel()));
  }
  return all;
}

struct Called {
  std::string call, list, number;

  std::string text() const { return call + "\n" + list + "\n" + number; }
  static Called from(const std::string& text) {
    Called called;
    std::istringstream lines(text);
    std::getline(lines, called.call);
    std::getline(lines, called.list);
    std::getline(lines, called.number);
    return called;
  }
};

/// All ranks give the same list, or all throw. Gives what rank 0 calls this subgroup, which nobody else's is.
std::string agree(const ProcessGroupPtr& group, c10::IntArrayRef ranks) {
  std::random_device random;  // numbers from a counter would be those of another group's rank 0 as well
  const Called own{kCall, list_text(ranks), std::to_string(std::uint64_t{random()} << 32 | random())};
  Called first;
  int rank = 0;
  for (const auto& text : exchanged(group, own.text())) {
    const auto called = Called::from(text);
    if (rank == 0) first = called;
    const auto at_rank = " on rank " + std::to_string(rank);
    if (called.call != kCall) {
      throw ConfigError("rank " + std::to_string(group->getRank()) + " has called " + kCall +
                        ", which is not what was called" + at_rank + ": all ranks of a group call it alike.");
    }
    if (called.list != first.list) {
      throw ConfigError(std::string(kCall) + " was given " + first.list + " on rank 0 and " + called.list +
                        at_rank + ": all ranks of a group call it with the same list.");
    }
    ++rank;
  }
  return first.number;
}

/// Where the members of one subgroup meet.
class Meeting {
 public:
  /// `apart`: what is made is no group of the parent's members.
  Meeting(const ProcessGroupPtr& parent, c10::IntArrayRef ranks, const std::string& name, bool apart)
      : parent_(parent),
        apart_(apart),
        ours_(dynamic_cast<const MemberGroup*>(parent.get())),
        ranks_(ranks.begin(), ranks.end()),
        rank_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), parent->getRank()) - ranks_.begin())),
        name_("reef_subgroup_" + name),
        store_(c10::make_intrusive<c10d::PrefixStore>(name_, parent->getStore())) {
    if (auto backend = backend_of(*parent, c10::kCPU); is(backend, "gloo")) gloo_ = std::move(backend);
    if (auto backend = backend_of(*parent, c10::kCUDA); is_nccl(backend)) nccl_ = std::move(backend);
  }

  /// Throws what this member cannot do.
  ProcessGroupPtr open() {
    const milliseconds timeout = gloo_ ? timeout_of_gloo(*gloo_) : timeout_of_nccl(*nccl_);
    // The others hear of it while they still wait.
    const Deadline deadline = std::chrono::steady_clock::now() + timeout * 3 / 4;
    auto group = make_group();
    if (gloo_) {
      check_descriptors();
      own_keys_ = c10::make_intrusive<WatchedStore>(store_, check(), deadline);
      const auto connected = connect_gloo(deadline);
      for (const auto& device : parent_->getDeviceTypes()) {
        if (is(parent_->getBackend(device.type()), "gloo"))
          group->setBackend(device.type(), Group::GLOO, connected);
      }
    }
    if (nccl_) {
      const StorePtr store = c10::make_intrusive<c10d::PrefixStore>("nccl", store_);
      group->setBackend(c10::kCUDA, Group::NCCL,
                        make_nccl_backend(store, rank_, size(), timeout_of_nccl(*nccl_)));
    }
    group->setDefaultBackend(gloo_ ? Group::GLOO : Group::NCCL);
    group->setGroupName(name_);
    return group;
  }

  /// Ends the waiting of the other members. Gives the sentence that all throw: of the first to fail.
  std::string fail(const std::exception& error) {
    auto text = message_of(error);
    text = text.substr(0, text.find('\n'));
    const auto own = "rank " + std::to_string(parent_->getRank()) + " of " +
                     std::to_string(parent_->getSize()) + " could not join the subgroup of ranks " +
                     list_text(ranks_) + ": " + text;
    try {
      const auto said = store_->compareSet(kFailed, "", own);
      failed_ = said == own;
      return said;
    } catch (const std::exception&) {
      return own;  // the store is gone: they wait until their deadline
    }
  }

  /// Tidies up when nobody waits here any more. A rank that serves the store may have ended since, and its
  /// keys with it: whatever waits for that rank next is told.
  void leave() noexcept {
    try {
      if (own_keys_) own_keys_->delete_own_keys();
      if (failed_) store_->deleteKey(kFailed);
    } catch (const std::exception&) {
    }
  }

 private:
  int size() const { return static_cast<int>(ranks_.size()); }

  ProcessGroupPtr make_group() const {
    if (ours_ == nullptr || apart_) return c10::make_intrusive<Group>(store_, rank_, size());
    std::vector<int> of_members;
    for (const auto rank : ranks_) of_members.push_back(ours_->rank_of_member(static_cast<int>(rank)));
    return c10::make_intrusive<MemberGroup>(store_, rank_, size(), name_, ours_->members, ours_->heart,
                                            std::move(of_members));
  }

  /// gloo ends the process when it cannot accept a connection.
  void check_descriptors() const {
    const std::int64_t needed = size() - 1 + kOtherDescriptors;
    const std::int64_t left = descriptors_left();
    if (left >= needed) return;
    C10_THROW_ERROR(DistError, "it may open " + std::to_string(left) + " more files and sockets, and needs " +
                                   std::to_string(needed) + "; raise the limit (ulimit -n), or end groups");
  }

  /// Owns what it looks at: it may be asked by a thread that nobody waits for any more.
  std::function<void()> check() const {
    std::function<void()> throw_if_ended = [] {};
    if (ours_ != nullptr) {
      throw_if_ended = [members = ours_->members, ranks = ours_->ranks] { members->throw_if_ended(ranks); };
    }
    return [store = store_, throw_if_ended] {
      if (const auto said = value_of(*store, kFailed))
        C10_THROW_ERROR(DistError, std::string(said->begin(), said->end()));
      throw_if_ended();
    };
  }

  /// On a thread of its own: gloo waits for a member's call, and cannot be told that none will come.
  c10::intrusive_ptr<c10d::Backend> connect_gloo(Deadline deadline) const {
    Attempt connected([store = own_keys_, gloo = gloo_, rank = rank_, size = size()] {
      return make_gloo_backend(store, rank, size, *gloo);
    });
    const auto look = check();
    for (auto pause = kLookEvery; !connected.is_over_by(std::chrono::steady_clock::now() + pause);
         pause = std::min(pause * 2, kLastLook)) {
      look();
      if (has_passed(deadline + kLastLook)) C10_THROW_ERROR(DistError, "a member did not connect in time");
    }
    return connected.result();
  }

  ProcessGroupPtr parent_;
  bool apart_;
  const MemberGroup* ours_;  ///< nullptr: made by other means
  std::vector<std::int64_t> ranks_;
  int rank_;
  std::string name_;
  StorePtr store_;
  c10::intrusive_ptr<WatchedStore> own_keys_;
  c10::intrusive_ptr<c10d::Backend> gloo_;  ///< the parent's; nullptr
  c10::intrusive_ptr<c10d::Backend> nccl_;
  bool failed_ = false;
};

void check_group(const ProcessGroupPtr& group) {
  const std::string name = kCall;
  if (!group)
    throw ConfigError(name + " was given no process group: make one with reef::init_process_group.");
  if (group->getSize() == 1) return;
  const auto on_cpu = backend_of(*group, c10::kCPU);
  if (!is(on_cpu, "gloo") && (on_cpu || !is_nccl(backend_of(*group, c10::kCUDA)))) {
    throw ConfigError(name + " was given a group over " +
                      (on_cpu ? on_cpu->getBackendName() : group->getBackendName()) +
                      ": it makes groups over gloo and NCCL, as reef::init_process_group does.");
  }
  if (!group->getStore()) {
    throw ConfigError(name +
                      " was given a group without a store, where members would meet: make it with "
                      "reef::init_process_group.");
  }
}

ProcessGroupPtr make_subgroup(const ProcessGroupPtr& group, c10::IntArrayRef ranks, bool apart) {
  check_group(group);
  const int size = group->getSize();
  note_call(*group, kCall);
  const std::string name = size == 1 ? "alone" : agree(group, ranks);
  if (const auto what = fault(ranks, size); !what.empty()) {
    throw ConfigError(std::string(kCall) + " was given " + what +
                      ": name each member once, by its rank from 0 to " + std::to_string(size - 1) + ".");
  }
  const bool member = std::find(ranks.begin(), ranks.end(), group->getRank()) != ranks.end();
  if (ranks.size() == 1) return member ? make_world_of_one("reef_subgroup_" + name) : ProcessGroupPtr();
  Meeting meeting(group, ranks, name, apart);
  ProcessGroupPtr made;
  std::string wrong;
  try {
    if (member) made = meeting.open();
  } catch (const std::exception& error) {
    wrong = meeting.fail(error);
  }
  const auto all = exchanged(group, wrong);
  meeting.leave();
  for (const auto& text : all) {
    if (!text.empty()) throw ProcessGroupError(text, group->getRank());
  }
  return made;
}

}  // namespace

ProcessGroupPtr subgroup(const ProcessGroupPtr& group, c10::IntArrayRef ranks) {
  return make_subgroup(group, ranks, /*apart=*/false);
}
ProcessGroupPtr subgroup_apart(const ProcessGroupPtr& group, c10::IntArrayRef ranks) {
  return make_subgroup(group, ranks, /*apart=*/true);
}

}  // namespace reef
