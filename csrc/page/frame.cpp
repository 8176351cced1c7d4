#include "page/frame.h"

#include <memory>

namespace reef {

Frame& Frame::make(std::size_t device_slot) {
  static thread_local std::array<std::unique_ptr<Frame>, kDeviceSlots> owned;
  owned[device_slot] = std::make_unique<Frame>();
  known_[device_slot] = owned[device_slot].get();
  return *known_[device_slot];
}

}  // namespace reef
