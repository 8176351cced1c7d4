#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/collectives.h"

namespace reef {

/// Integers (on the CPU) added up over the ranks of a group, if there is one; sent by way of `device`, which
/// is the group's. All ranks alike. Throws RankFailed.
inline at::Tensor sum_over_ranks(const at::Tensor& own, c10::Device device, const ProcessGroupPtr& group) {
  if (!group || group->getSize() == 1) return own;
  const at::Tensor sum = own.to(device);
  all_reduce({sum}, group);
  return sum.cpu();
}

}  // namespace reef
