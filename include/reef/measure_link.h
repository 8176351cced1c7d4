#pragma once

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/link.h"

namespace reef {

/// What messages between the ranks of a group cost, over gloo, as exchanges of gradients send them: each rank
/// sends to the next and receives from the one before at once, ten sizes from 1 KiB to 512 KiB, one message
/// after another and four together. What counts is the slowest rank, and of three times the fastest; so all
/// ranks get the same. A rank sends 24 MiB; needs 4 MiB. Where noise hides the bandwidth, it measures up to
/// five times, and gives bounds (bound_link) where that did not help.
///
/// All ranks call it alike, when nothing else uses the network. Throws ConfigError for a group of one rank,
/// which has no link, and where the group has no gloo for the CPU, and RankFailed.
REEF_API LinkFit measure_link(const ProcessGroupPtr& group);

}  // namespace reef
