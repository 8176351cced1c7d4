#pragma once

#include <memory>

#include "reef/tier.h"
#include "tier/swap_file.h"

namespace reef {

/// disk_tier() on a file of the caller's.
std::shared_ptr<Tier> disk_tier_on(std::unique_ptr<SwapFile> file, const DiskTierOptions& options);

}  // namespace reef
