#include "reef/global_mean.h"

#include <ATen/ops/full.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"

namespace reef {

at::Tensor global_mean(const at::Tensor& sum, std::int64_t count, const ProcessGroupPtr& group,
                       Reduction reduction) {
  if (!group)
    throw ConfigError("global_mean was given no process group; make one with reef::init_process_group");
  const at::Tensor all = at::full({1}, count, at::TensorOptions().dtype(at::kLong).device(sum.device()));
  if (group->getSize() > 1) all_reduce({all}, group);
  const auto total = all.item<std::int64_t>();
  if (total <= 0) {
    throw ConfigError("global_mean: the ranks have a count of " + std::to_string(total) +
                      " together, of which there is no mean; leave the step out on all ranks");
  }
  const at::Tensor mean = sum / total;
  return reduction == Reduction::kMean ? mean * group->getSize() : mean;
}

}  // namespace reef
