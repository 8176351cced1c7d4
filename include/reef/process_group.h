#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/export.h"
#include "reef/rendezvous.h"

namespace reef {

/// Brings up a c10d process group without Python: gloo for CPU tensors and, in a CUDA build with a device
/// present, NCCL for CUDA tensors, both in one group. A world of one is the identity and opens no socket and
/// no file.
///
/// Returns on every rank or throws on every rank: each rank checks in at the store, and one that fails says
/// why there, so the others fail with its reason instead of waiting. Nothing outlives `options.timeout`.
/// Throws ConfigError (a half-set environment, a rank outside the world) and ProcessGroupError (port in use,
/// store unreachable, ranks missing), each naming rank, host and port. Ranks bring up their groups in the
/// same order, and may try again, some more often than others; a store that this process serves stays open
/// until the process ends.
REEF_API c10::intrusive_ptr<c10d::ProcessGroup> init_process_group(const ProcessGroupOptions& options = {});

}  // namespace reef
