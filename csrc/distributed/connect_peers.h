#pragma once

#include <map>
#include <memory>
#include <set>
#include <utility>

#include "distributed/peer_connection.h"
#include "reef/collectives.h"

namespace reef {

using PeerConnections = std::map<int, std::shared_ptr<PeerConnection>>;  ///< by the other rank

/// Connects this rank to all that it is paired with. All ranks of the group call it alike; each is given all
/// pairs that it is in, the smaller rank first, and there are none only if no rank has any. They listen on
/// the network of the group's gloo for as long as this takes, 10 s at most, and know each other by random
/// numbers that go through the group. Returns nothing, on all ranks, where two cannot be connected (a
/// firewall may let gloo's ports pass alone): the rank that found it warns of it. Throws RankFailed.
PeerConnections connect_peers(const ProcessGroupPtr& group, const std::set<std::pair<int, int>>& pairs);

}  // namespace reef
