#include "current_device.h"

#include <ATen/Context.h>

namespace reef {

c10::Device with_index(c10::Device device) {
  if (!device.is_cuda() || device.has_index()) return device;
  device.set_index(at::hasCUDA() ? at::detail::getCUDAHooks().getCurrentDevice() : c10::DeviceIndex{0});
  return device;
}

}  // namespace reef
