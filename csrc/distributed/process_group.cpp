#include "reef/process_group.h"

#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "distributed/gloo.h"
#include "distributed/identity.h"
#include "distributed/members.h"
#include "distributed/nccl.h"
#include "distributed/store.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr milliseconds kLastWords{3000};  // after the deadline, to publish a failure and let others hear it

using Group = c10d::ProcessGroup;
using GroupPtr = c10::intrusive_ptr<Group>;

/// How many groups this rank has tried to bring up at this address: every rank counts alike, so the number
/// keeps their keys apart, also those of an attempt that failed.
int next_attempt(const Rendezvous& rendezvous) {
  static std::mutex mutex;
  static std::map<std::string, int> attempts;
  const std::lock_guard lock(mutex);
  return attempts[std::to_string(rendezvous.rank) + '@' + address_text(rendezvous) + rendezvous.prefix]++;
}

GlooNetwork network_of(const ProcessGroupOptions& options, const Members& members) {
  auto interface = options.interface;
  if (interface.empty()) interface = process_environment("GLOO_SOCKET_IFNAME").value_or("");
  return {.interface = interface, .one_machine = members.on_one_machine()};
}

GroupPtr connect(const Rendezvous& rendezvous, const ProcessGroupOptions& options, const std::string& name,
                 Deadline deadline) {
  const StorePtr store =
      c10::make_intrusive<c10d::PrefixStore>(name, open_store(rendezvous, options.timeout, deadline));
  const StorePtr members_store = c10::make_intrusive<c10d::PrefixStore>("members", store);
  const auto members = std::make_shared<Members>(members_store, rendezvous, options.timeout);
  const int rank = rendezvous.rank;
  const int size = rendezvous.world_size;
  try {
    members->check_in(deadline);
    const auto connected = [watched = members->watched(store, deadline), rank, size,
                            network = network_of(options, *members), timeout = options.timeout] {
      return make_gloo_backend(watched, rank, size, network, timeout);
    };
    const auto gloo = within(deadline, connected);
    if (!gloo) C10_THROW_ERROR(DistError, "gloo did not connect to all others in time");
    const auto nccl =
        make_nccl_backend(c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size, options.timeout);
    // A file would grow with every beat.
    const bool beats = options.heartbeat.count() > 0 && rendezvous.store == StoreKind::kTcp;
    const auto heart = beats ? members->heartbeat(options.heartbeat) : nullptr;
    members->await_connected(deadline);
    store->setTimeout(options.timeout);
    auto group = c10::make_intrusive<MemberGroup>(store, rank, size, name, members, heart);
    group->setBackend(c10::kCPU, Group::GLOO, *gloo);
    if (nccl) group->setBackend(c10::kCUDA, Group::NCCL, nccl);
    group->setDefaultBackend(Group::GLOO);
    group->setGroupName(name);
    return group;
  } catch (const ProcessGroupError& error) {
    throw members->failed(message_of(error));
  } catch (const std::exception& error) {
    throw members->failed("rank " + std::to_string(rank) + " of " + std::to_string(size) + " (" +
                          Process::self().text() + ") could not join the group at " +
                          address_text(rendezvous) + ": " + message_of(error));
  }
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(const ProcessGroupOptions& options) {
  const auto rendezvous = resolve_rendezvous(options);
  const auto name = rendezvous.prefix + "/group_" + std::to_string(next_attempt(rendezvous));
  if (rendezvous.world_size == 1) return make_world_of_one(name);
  // Every step ends by the deadline, except a question to a store that has vanished from the network.
  const Deadline deadline = std::chrono::steady_clock::now() + options.timeout;
  const auto group =
      within(deadline + kLastWords, [=] { return connect(rendezvous, options, name, deadline); });
  if (!group) {
    throw ProcessGroupError(
        "rank " + std::to_string(rendezvous.rank) + " of " + std::to_string(rendezvous.world_size) +
            " got no answer any more from the store at " + address_text(rendezvous) + " within " +
            seconds_text(options.timeout) + ": check the host that serves it and the network.",
        rendezvous.rank);
  }
  return *group;
}

}  // namespace reef
