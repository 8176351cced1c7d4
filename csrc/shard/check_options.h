#pragma once

#include <string>

#include "reef/shard.h"

namespace reef {

/// Throws ConfigError for options that so many ranks cannot use, alone or with these parameters, and for
/// parameters that cannot be reduced. `caller`: what was given them, as errors say it.
void check_options(const std::string& caller, const Shard::Named& parameters, const ShardOptions& options,
                   int ranks);

}  // namespace reef
