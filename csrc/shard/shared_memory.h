#pragma once

#include "reef/shard.h"

namespace reef {

/// Throws ConfigError, which names both, if a parameter that a shard gives other memory has memory in common
/// with another parameter or a buffer: they would be apart from then on. Of parameters and buffers under
/// every name. Parameters that lie beside each other in one storage, and one that has two names, are none
/// such.
void check_memory_is_apart(const Shard::Named& parameters, const Shard::Named& buffers,
                           const ShardOptions& options);

}  // namespace reef
