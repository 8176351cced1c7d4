#include "reef/global_mean.h"

#include <ATen/ops/full.h>

#include <string>

#include "distributed/sum_over_ranks.h"
#include "reef/error.h"

namespace reef {

at::Tensor global_mean(const at::Tensor& sum, std::int64_t count, const ProcessGroupPtr& group,
                       Reduction reduction) {
  if (!group)
    throw ConfigError("global_mean was given no process group; make one with reef::init_process_group");
  const auto total =
      sum_over_ranks(at::full({1}, count, at::kLong), sum.device(), group).item<std::int64_t>();
  if (total <= 0) {
    throw ConfigError("global_mean: the ranks have a count of " + std::to_string(total) +
                      " together, of which there is no mean; leave the step out on all ranks");
  }
  const at::Tensor mean = sum / total;
  return reduction == Reduction::kMean ? mean * group->getSize() : mean;
}

}  // namespace reef
