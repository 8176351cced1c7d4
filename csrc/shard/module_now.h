#pragma once

#include <ATen/core/Tensor.h>

#include "reef/shard.h"

namespace reef {

/// What `module` has from now on. A module that no shared pointer owns may go before the shard: of it nothing
/// is known later.
Shard::ModuleNow look_at(torch::nn::Module& module);

/// Parameters or buffers of a module, by the names that it gives them.
Shard::Named named(const torch::OrderedDict<std::string, at::Tensor>& given);

}  // namespace reef
