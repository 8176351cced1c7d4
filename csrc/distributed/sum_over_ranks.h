#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/host_numbers.h"
#include "reef/collectives.h"

namespace reef {

/// Integers (on the CPU) added up over the ranks of a group, if there is one, whose tensors are on `device`
/// (device_of_host_numbers()). All ranks alike. Throws RankFailed.
inline at::Tensor sum_over_ranks(const at::Tensor& own, c10::Device device, const ProcessGroupPtr& group) {
  if (!group || group->getSize() == 1) return own;
  const c10::Device between = device_of_host_numbers(*group, device);
  const at::Tensor sum = page_locked(own, between).to(between, /*non_blocking=*/true);
  all_reduce({sum}, group);
  return read_by_host(sum);
}

}  // namespace reef
