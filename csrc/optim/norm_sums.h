#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "distributed/group_tags.h"
#include "distributed/slice_exchange.h"

namespace reef::optim {

/// Integers added up over the ranks of a group, by messages that nothing else takes for its own, so that a
/// step may run beside the program: of norms, each rank's parts (ExactSum's digits, whose sum has no order).
class NormSums {
 public:
  /// All ranks alike. Throws ConfigError without a group, and RankFailed.
  explicit NormSums(const ProcessGroupPtr& group);
  /// `own`: int64, contiguous, on the CPU, of one shape on all ranks, which call it alike. Throws RankFailed.
  at::Tensor add_up(const at::Tensor& own);

 private:
  std::optional<GroupTags> tags_;  ///< none: one rank
  std::optional<SliceExchange> ranks_;
};

}  // namespace reef::optim
