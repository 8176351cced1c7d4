#include "page/frame.h"

#include <memory>

namespace reef {

// A thread that runs an operator while it ends (from the destructor of something it owns) gets a frame that
// is never freed.
Frame& Frame::make(std::size_t device_slot) {
  static thread_local bool ended = false;
  struct Owned {
    ~Owned() {
      known_ = {};
      ended = true;
    }
    std::array<std::unique_ptr<Frame>, kDeviceSlots> frames;
  };
  static thread_local Owned owned;
  Frame* const frame = new Frame;
  if (!ended) owned.frames[device_slot].reset(frame);
  known_[device_slot] = frame;
  return *frame;
}

}  // namespace reef
