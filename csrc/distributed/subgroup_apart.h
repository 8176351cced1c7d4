#pragma once

#include "reef/subgroup.h"

namespace reef {

/// As subgroup(), with a fate of its own: that a rank of it is gone ends what waits in it, and nothing else;
/// RankFailed does not say which, and nobody watches for silence.
ProcessGroupPtr subgroup_apart(const ProcessGroupPtr& group, c10::IntArrayRef ranks);

}  // namespace reef
