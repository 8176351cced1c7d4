#include "page/memory.h"
#include "reef/error.h"

namespace reef {

std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex) {
  throw ConfigError("this build of Reef has no CUDA, and so no budget for it");
}

}  // namespace reef
