#include "distributed/connect_peers.h"

#include <c10/util/Exception.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "deadline.h"
#include "distributed/bytes_over_ranks.h"
#include "distributed/gloo.h"
#include "distributed/members.h"
#include "distributed/peer_listener.h"
#include "reef/error.h"

namespace reef {
namespace {

constexpr milliseconds kLongest{10000};

/// Returns an address of this rank on the network of the group's gloo. Follows the rules by which LibTorch
/// chooses that network.
SocketAddress own_address(c10d::ProcessGroup& group) {
  const auto* const ours = dynamic_cast<const MemberGroup*>(&group);
  const GlooNetwork network = ours != nullptr && ours->members
                                  ? ours->members->network()
                                  : GlooNetwork{process_environment("GLOO_SOCKET_IFNAME").value_or("")};
  const std::string interface = network.interface.substr(0, network.interface.find(','));
  const std::optional<SocketAddress> address =
      !interface.empty() ? address_of_interface(interface)
                         : address_of_host(network.one_machine ? "127.0.0.1" : Process::self().host);
  if (!address) throw std::runtime_error("it has no address on its group's network");
  return *address;
}

PeerConnections connected(PeerListener& listener, const std::vector<PeerPlace>& places, int own_rank,
                          const std::set<std::pair<int, int>>& pairs, milliseconds timeout) {
  PeerConnections connections;
  const Deadline deadline = std::chrono::steady_clock::now() + kLongest;
  const auto add = [&](int rank, Socket socket) {
    connections[rank] =
        std::make_shared<PeerConnection>(socket.release(), "rank " + std::to_string(rank), timeout);
  };
  std::set<int> callers;
  for (const auto& [smaller, larger] : pairs) {
    if (smaller == own_rank) callers.insert(larger);
    if (larger == own_rank) add(smaller, call_peer(places.at(smaller), smaller, own_rank, deadline));
  }
  while (!callers.empty()) {
    auto [rank, socket] = listener.accept(callers, deadline);
    callers.erase(rank);
    add(rank, std::move(socket));
  }
  return connections;
}

}  // namespace

PeerConnections connect_peers(const ProcessGroupPtr& group, const std::set<std::pair<int, int>>& pairs) {
  if (pairs.empty()) return {};
  const int own_rank = group->getRank();
  std::string wrong;
  const auto attempt = [&](const auto& act) {
    try {
      if (wrong.empty()) act();
    } catch (const std::exception& error) {
      wrong = message_of(error);
      TORCH_WARN("reef: rank ", own_rank, " has no connections of its own to others: ", wrong,
                 ". Messages of pipelines go by gloo, which takes longer.");
    }
  };
  std::optional<PeerListener> listener;
  PeerConnections connections;
  attempt([&] { listener.emplace(own_address(*group)); });
  std::vector<PeerPlace> places;
  bool all_listen = true;
  for (const std::string& text : gather_texts(listener ? listener->place().text() : "", group, c10::kCPU)) {
    places.push_back(PeerPlace::from_text(text));
    all_listen = all_listen && !text.empty();
  }
  if (!all_listen) return {};
  attempt([&] {
    const milliseconds timeout = timeout_of_gloo(*group->getBackend(c10::kCPU));
    connections = connected(*listener, places, own_rank, pairs, timeout);
  });
  for (const std::string& of_one : gather_texts(wrong, group, c10::kCPU)) {
    if (!of_one.empty()) return {};
  }
  return connections;
}

}  // namespace reef
