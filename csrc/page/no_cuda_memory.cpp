#include <string>

#include "page/memory.h"
#include "reef/error.h"

namespace reef {

std::unique_ptr<Memory> cuda_memory(c10::DeviceIndex index) {
  throw ConfigError("there is no budget for cuda:" + std::to_string(index) +
                    ": this build of Reef has no CUDA");
}

}  // namespace reef
