#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "distributed/nccl.h"

namespace reef {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const StorePtr&, int, int, milliseconds) { return {}; }

}  // namespace reef
