#pragma once

#include <c10/core/Device.h>

namespace reef {

/// Returns the device with its index. As everywhere in LibTorch, "cuda" is the current device.
c10::Device with_index(c10::Device device);

}  // namespace reef
