#pragma once

#include <map>
#include <memory>
#include <set>
#include <utility>

#include "distributed/peer_connection.h"
#include "reef/collectives.h"

namespace reef {

using PeerConnections = std::map<int, std::shared_ptr<PeerConnection>>;  ///< by the other rank

/// Connects this rank to the other rank of each pair that it is in. All ranks of the group call this alike.
/// `pairs` holds at least this rank's own, the smaller rank first, and is empty on all ranks or on none.
/// Ranks listen on the network of the group's gloo until they are connected, 10 s at most; a caller proves
/// that it belongs to the group by a random number that was exchanged through it. If two ranks cannot be
/// connected, for example because a firewall lets only gloo's ports pass, the rank that finds it warns, and
/// all ranks return no connections. Throws RankFailed.
PeerConnections connect_peers(const ProcessGroupPtr& group, const std::set<std::pair<int, int>>& pairs);

}  // namespace reef
