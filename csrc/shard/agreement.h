#pragma once

#include <string>

#include "reef/shard.h"

namespace reef {

/// Of the gatherer, and of the reducer's two lines.
inline constexpr int kExchanges = 3;

/// Throws ConfigError, with the same sentence on every rank, if the ranks' models differ: the first parameter
/// or buffer, by position, whose name, dtype, shape, layout or need of a gradient is another, or the first
/// option. `wrong` is what one rank alone has found wrong, if anything: it is thrown on all. Gives the number
/// of the first of kExchanges exchanges that are the shard's own, the same on every rank.
int check_agreement(const Shard::Named& parameters, const Shard::Named& buffers, const ProcessGroupPtr& group,
                    const ShardOptions& options, const std::string& wrong);

}  // namespace reef
