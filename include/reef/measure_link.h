#pragma once

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/link.h"

namespace reef {

/// Measures what messages between the ranks of a group cost over gloo, sent as exchanges of gradients send
/// them: every rank sends to the next and receives from the one before, in ten sizes from 1 KiB to 512 KiB,
/// one message after another and four together. Each measurement is repeated three times; the fastest of
/// them on the slowest rank counts, so all ranks get the same link. A rank sends 24 MiB and needs 4 MiB of
/// memory. If noise hides the bandwidth, the measurement is repeated up to five times, and bound_link() gives
/// the result if that did not help.
///
/// Call it on all ranks, while nothing else uses the network. Throws RankFailed, and ConfigError for a group
/// of one rank, which has no link, and for a group without gloo for the CPU.
REEF_API LinkFit measure_link(const ProcessGroupPtr& group);

}  // namespace reef
