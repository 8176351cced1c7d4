#pragma once

#include <string>

#include "reef/export.h"

namespace reef {

/// What this library was built from and against. The `built_` versions are compared with what is loaded by
/// `python -m reef doctor`; a full-ABI binary fits exactly one minor version of torch.
struct BuildInfo {
  std::string version;     ///< of Reef
  std::string git_commit;  ///< "" outside a git checkout
  std::string built_torch;
  std::string built_cuda;  ///< "" in a CPU-only build
  std::string cuda_archs;  ///< as in TORCH_CUDA_ARCH_LIST
  std::string compiler;
  std::string loaded_torch;  ///< of the LibTorch in this process
};
REEF_API BuildInfo build_info();

}  // namespace reef
