#pragma once

#include <ATen/core/Tensor.h>

#include "reef/collectives.h"

namespace reef {

/// Scales the gradients of `parameters` so that their joint 2-norm is `max_norm` at most, as
/// torch::nn::utils::clip_grad_norm_ does; gives the norm that they had. Of parts (part.h) the norm is that
/// of the whole parameters: with a group, all of whose ranks call it alike, a rank that has no part too.
///
///     reef::clip_grad_norm_(sharded.parameters(), 1.0, group);
///
/// Bit for bit the same for any number of ranks, at every stage, and for any number of threads: sums of 256
/// squares in double are added up without rounding. Gradients that are not all finite stay as they are, and
/// the norm is infinite, on every rank. Reads every gradient once, and writes them where the norm is larger;
/// sends 552 bytes a rank. Throws ConfigError for sparse gradients, integers and complex numbers, and for
/// parameters of a Pipeline over several ranks, which has a function of this name; RankFailed.
REEF_API double clip_grad_norm_(at::TensorList parameters, double max_norm,
                                const ProcessGroupPtr& group = {});

}  // namespace reef
