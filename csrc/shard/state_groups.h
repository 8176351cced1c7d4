#pragma once

#include <string>
#include <vector>

#include "reef/optimizer_state.h"
#include "shard/state_over_ranks.h"

namespace reef {

/// Of the parameters of a group.
using GroupNames = std::vector<std::string>;

/// Which parameters are in each group, on any rank, in the module's order. All ranks call this alike: throws
/// ConfigError on all if their groups are not alike; in the options' values, too, if these are to be `saved`.
std::vector<GroupNames> merged_groups(const DividedParameters& all,
                                      const std::vector<OptimizerState::Group>& own, bool saved);

/// Of a file that does not say which parameters it has: torch's own. Throws ConfigError if groups, names or
/// parameters are not as many.
void name_by_place(OptimizerState& state, const std::vector<GroupNames>& merged);

/// Before states are looked for, since a parameter that took no step has none. Throws ConfigError if one of
/// these groups has a parameter that none of the states has there.
void check_known(const std::vector<OptimizerState::Group>& own, const std::vector<OptimizerState>& given);

}  // namespace reef
