#pragma once

#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <utility>

#include "reef/tier.h"

namespace reef::bind {

/// What Python's reef.Tier holds.
struct BoundTier : torch::CustomClassHolder {
  explicit BoundTier(std::shared_ptr<Tier> given) : tier(std::move(given)) {}
  std::shared_ptr<Tier> tier;
};

/// Called by whoever registers what is given a tier, before it does; the first call counts.
void register_tier(torch::Library& m);

}  // namespace reef::bind
