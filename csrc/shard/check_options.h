#pragma once

#include <string>

#include "reef/shard.h"

namespace reef {

/// Throws ConfigError for options that so many ranks cannot use, alone or with these parameters, and for
/// parameters that cannot be reduced. `caller`: what was given them, as errors say it.
void check_options(const std::string& caller, const Shard::Named& parameters, const ShardOptions& options,
                   const ProcessGroupPtr& group);

/// Throws ConfigError for a method that cannot compress what the group exchanges of this device. `what`: that
/// is on it, as in "reef::shard was given parameter weight, which is".
void check_device(const std::string& what, c10::Device device, Compression compression,
                  const ProcessGroupPtr& group);

}  // namespace reef
