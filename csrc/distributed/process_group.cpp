#include "reef/process_group.h"

#include <chrono>
#include <memory>
#include <string>
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

std::string could_not_join(const Rendezvous& rendezvous, const std::exception& error) {
  return "rank " + std::to_string(rendezvous.rank) + " of " + std::to_string(rendezvous.world_size) + " (" +
         Process::self().text() + ") could not join the group at " + address_text(rendezvous) + ": " +
         message_of(error);
}

/// Returns null if the attempt of this name is over and this rank has no part in it.
GroupPtr attempt(const StorePtr& of_all, const Rendezvous& rendezvous, const ProcessGroupOptions& options,
                 const std::string& name, std::int64_t call, Deadline deadline) {
  const StorePtr store = c10::make_intrusive<c10d::PrefixStore>(name, of_all);
  const StorePtr members_store = c10::make_intrusive<c10d::PrefixStore>("members", store);
  const auto members =
      std::make_shared<Members>(members_store, rendezvous, options.timeout, options.interface);
  const int rank = rendezvous.rank;
  const int size = rendezvous.world_size;
  try {
    if (!members->check_in(call, deadline)) return {};
    const auto connected = [watched = members->watched(store, deadline), rank, size,
                            network = members->network(), timeout = options.timeout] {
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
    throw members->failed(could_not_join(rendezvous, error));
  }
}

/// Joins the attempt whose number is in the store. If each rank counted its own attempts, a rank that had
/// tried more often than another, or had been restarted, would wait in a different attempt than the others.
GroupPtr connect(const Rendezvous& rendezvous, const ProcessGroupOptions& options, Deadline deadline) {
  const auto store = open_store(rendezvous, options.timeout, deadline);
  const std::int64_t call = std::chrono::steady_clock::now().time_since_epoch().count();
  const auto number_key = rendezvous.prefix + "/group";
  try {
    for (;;) {
      const std::int64_t number = store->add(number_key, 0);
      const auto name = number_key + '_' + std::to_string(number);
      if (auto group = attempt(store, rendezvous, options, name, call, deadline)) return group;
      // Of the ranks that know that it is over, the first begins the next.
      store->compareSet(number_key, std::to_string(number), std::to_string(number + 1));
    }
  } catch (const ProcessGroupError&) {
    throw;
  } catch (const std::exception& error) {
    throw ProcessGroupError(could_not_join(rendezvous, error), rendezvous.rank);
  }
}

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(const ProcessGroupOptions& options) {
  const auto rendezvous = resolve_rendezvous(options);
  if (rendezvous.world_size == 1) return make_world_of_one(rendezvous.prefix + "/alone");
  // Every step ends by the deadline, except a question to a store that has vanished from the network.
  const Deadline deadline = std::chrono::steady_clock::now() + options.timeout;
  const auto group = within(deadline + kLastWords, [=] { return connect(rendezvous, options, deadline); });
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
