#pragma once

#include <c10/util/ArrayRef.h>

#include "reef/collectives.h"
#include "reef/export.h"

namespace reef {

/// A process group over some ranks of `group`, on the same backends, network and timeouts: rank i of it is
/// `ranks[i]` of `group`. All ranks of `group` call this alike; who is not among `ranks` gets nullptr. Works
/// for groups made by init_process_group, by this, or by c10d's own means over gloo or NCCL.
///
/// The members come up together: each gets the group, or each throws. A rank that is gone is named as in the
/// group that init_process_group made, by its rank there, and all subgroups of that group share its fate.
/// Throws ConfigError on every rank of `group` if they disagree about the list, or if it is empty, repeats a
/// rank or names one that there is not; ProcessGroupError on the members if one of them could not connect;
/// RankFailed.
REEF_API ProcessGroupPtr subgroup(const ProcessGroupPtr& group, c10::IntArrayRef ranks);

}  // namespace reef
