#include "distributed/nccl.h"

#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace reef {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const StorePtr& store, int rank, int world_size,
                                                    milliseconds timeout) {
  if (c10::cuda::device_count() == 0) return {};
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size, options);
}

milliseconds timeout_of_nccl(c10d::Backend& backend) { return backend.getBackendOptions()->timeout; }

}  // namespace reef
