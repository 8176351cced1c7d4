#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "distributed/nccl.h"
#include "reef/error.h"

namespace reef {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const StorePtr&, int, int, milliseconds) { return {}; }

milliseconds timeout_of_nccl(c10d::Backend&) {
  throw ConfigError("a group has a backend for CUDA, and this Reef was built without: build it with CUDA.");
}

}  // namespace reef
