#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reef/shard.h"
#include "shard/gatherer.h"
#include "shard/reducer.h"
#include "shard/state_over_ranks.h"

namespace reef {

struct Shard::Parts {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  Named all_parameters;  ///< under every name
  Named all_buffers;
  DividedParameters divided;
  std::unique_ptr<Gatherer> gatherer;
  std::optional<Reducer> reducer;
  int no_sync = 0;
};

}  // namespace reef
