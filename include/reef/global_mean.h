#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "reef/collectives.h"

namespace reef {

/// The loss to call backward on where ranks have different numbers of tokens (samples, pixels): `sum`, this
/// rank's loss added up over its `count` of them, becomes its share of the mean over those of all ranks. The
/// mean of the ranks' means would give a token of a short batch more weight. `reduction` is that of the
/// gradients (ShardOptions). A rank that accumulates over several backward passes gives each the count of all
/// of its passes.
///
///     auto sum = cross_entropy(logits, tokens, CrossEntropyFuncOptions().reduction(torch::kSum));
///     reef::global_mean(sum, tokens.numel(), group).backward();
///
/// All ranks call it alike; sends 8 bytes a rank. With Reduction::kSum the gradients are, bit for bit, those
/// of one process that accumulates the ranks' sums over the whole count. Throws ConfigError on every rank if
/// there is none of them on any, and RankFailed.
REEF_API at::Tensor global_mean(const at::Tensor& sum, std::int64_t count, const ProcessGroupPtr& group,
                                Reduction reduction = Reduction::kMean);

}  // namespace reef
