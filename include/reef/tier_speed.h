#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "reef/chain_profile.h"
#include "reef/export.h"
#include "reef/tier.h"

namespace reef {

/// How fast `tier` copies from and to the device's memory, and what that takes of its cores, measured by
/// copying `bytes` there and back: for ChainProfile::tier_speed. Throws ConfigError if `bytes` is 0, the tier
/// has no room, or the device is neither the CPU nor CUDA, and what the tier throws.
REEF_API TierSpeed tier_speed(const std::shared_ptr<Tier>& tier, c10::Device device,
                              std::uint64_t bytes = std::uint64_t{16} << 20);

}  // namespace reef
