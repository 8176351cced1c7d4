#include "reef/build_info.h"

#include <ATen/Version.h>

namespace reef {
namespace {

// LibTorch has no function that returns its version; its configuration text has it among the build settings.
std::string loaded_torch_version() {
  const std::string config = at::show_config();
  constexpr const char* kKey = "TORCH_VERSION=";
  const auto begin = config.find(kKey);
  if (begin == std::string::npos) return "";
  const auto first = begin + std::string(kKey).size();
  return config.substr(first, config.find_first_not_of("0123456789.", first) - first);
}

}  // namespace

BuildInfo build_info() {
  return {REEF_VERSION,    REEF_GIT_COMMIT, REEF_BUILT_TORCH,      REEF_BUILT_CUDA,
          REEF_CUDA_ARCHS, REEF_COMPILER,   loaded_torch_version()};
}

}  // namespace reef
