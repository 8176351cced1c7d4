#include "reef/error.h"
#include "tier/uring.h"

namespace reef {

std::unique_ptr<Uring> open_uring(int, const std::vector<iovec>&) {
  throw ConfigError(
      "disk tier: io_uring is not to be had here: this Reef was built without liburing; give io = threads, "
      "which gives the same bytes, or automatic, or build it where liburing is installed");
}

}  // namespace reef
