#include "reef/error.h"
#include "reef/tier.h"

namespace reef {

std::shared_ptr<Tier> pinned_tier(std::uint64_t) {
  throw ConfigError("this build of Reef has no CUDA, and so no page-locked memory; give a host_tier");
}

}  // namespace reef
