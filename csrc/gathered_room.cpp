#include "gathered_room.h"

#include <algorithm>

namespace reef {

void GatheredRoom::after_step(std::int64_t fitting_bytes) {
  if (fitting_bytes < 0) {
    bytes_ = std::max<std::int64_t>(std::min(bytes_ + fitting_bytes, bytes_ / 2), 0);
    waits_ = patience_;
    patience_ = std::min<std::int64_t>(2 * patience_, std::int64_t{1} << 32);
  } else if (waits_ > 0) {
    --waits_;
  } else {
    bytes_ = std::max(bytes_, std::min(fitting_bytes, most_bytes_));
  }
}

}  // namespace reef
