#pragma once

#include <c10/util/intrusive_ptr.h>

#include "distributed/store.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace reef {

/// NCCL's collectives for CUDA tensors; nullptr in a build without CUDA and where there is no CUDA device. It
/// connects to the other ranks at the first collective, on the device of that collective's tensors.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const StorePtr& store, int rank, int world_size,
                                                    milliseconds timeout);

/// Of each of its collectives. `backend` must be NCCL's, as its name says.
milliseconds timeout_of_nccl(c10d::Backend& backend);

}  // namespace reef
