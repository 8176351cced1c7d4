#pragma once

#include <string>

#include "distributed/group_tags.h"
#include "reef/shard.h"

namespace reef {

/// Throws ConfigError, with the same sentence on every rank, if the ranks' models differ: the first parameter
/// or buffer, by position, whose name, dtype, shape, layout or need of a gradient is another, or the first
/// option. `wrong` is what one rank alone has found wrong, if anything: it is thrown on all. Gives the number
/// of the first of three exchanges that are the shard's own while `numbers` lives: the gatherer's, and those
/// of the reducer's two lines. `caller`: the call that all ranks make, by its name in errors.
int check_agreement(const std::string& caller, const Shard::Named& parameters, const Shard::Named& buffers,
                    const ProcessGroupPtr& group, const ShardOptions& options, std::string wrong,
                    GroupTags& numbers);

/// What must be alike on all ranks of the options, in a line.
std::string options_text(const ShardOptions& options);

/// How errors name the shard whose first exchange this is, alike on all ranks: "shard 2".
std::string shard_name(int first_exchange);

}  // namespace reef
