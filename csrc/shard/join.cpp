// Ranks that have no more batches take part in the passes of those that have.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/sum.h>

#include "reef/error.h"
#include "shard/shard_parts.h"

namespace reef {

using at::Tensor;

// An operator that records a gradient settles the step, as the first one of a forward pass does.
void Shard::Parts::use_parameters() const {
  if (!gatherer || divided.parameters.empty()) return;
  const at::AutoGradMode grad(true);
  at::sum(divided.parameters.back().tensor);
}

void Shard::join(const std::function<void()>& step) {
  const Parts& parts = *parts_;
  if (parts.no_sync > 0 || parts.local_sums > 0 || parts.update != nullptr)
    throw ConfigError(
        "join() was called in no_sync, in local_sums or beside a DelayedUpdate: end that first.");
  for (;;) {
    for (const Tensor& tensor : parameters()) tensor.mutable_grad().reset();
    for (const ReducedParameter& one : parts.divided.parameters) one.tensor.mutable_grad().reset();
    parts.use_parameters();
    try {
      if (!parts_->reducer->pass_without_batch()) return;
    } catch (const PassAbandoned&) {  // the rank whose batch it was goes on with its next
      continue;
    }
    step();
  }
}

}  // namespace reef
