#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reef/export.h"

namespace torch {
namespace optim {
class Optimizer;
}  // namespace optim
namespace serialize {
class InputArchive;
class OutputArchive;
}  // namespace serialize
}  // namespace torch

namespace reef {

/// What an optimizer keeps, as data: the contents of torch::optim's files, whatever the optimizer's class. It
/// is written and read as one is (torch::save, torch::load), in the same format, in which each can read the
/// other's: names and communication are additions that torch::optim does not look at.
struct OptimizerState {
  using Values = std::vector<std::pair<std::string, c10::IValue>>;
  struct Group {
    std::vector<std::string> ids;    ///< decimal numbers, each only once
    std::vector<std::string> names;  ///< of parameters, or of parts: name[first:last]. Empty: not known
    Values options;
  };
  std::vector<Group> groups;
  /// By id. What has taken no step has none.
  std::vector<std::pair<std::string, Values>> states;
  /// What the exchange of gradients of a reef::Shard remembers from step to step (ShardOptions::compression):
  /// of each rank by itself, since it is what that rank holds back. torch::optim does not look at it.
  struct Communication {
    std::string method;      ///< by which it is exchanged; empty: nothing is held back
    std::int64_t ranks = 0;  ///< of the run
    Values numbers;          ///< the same on all ranks
    /// By rank and name of the parameter, or of a part of it: name[first:last].
    std::vector<std::pair<std::int64_t, std::vector<std::pair<std::string, Values>>>> of_ranks;
  };
  Communication communication;
};

/// A copy of what it keeps: on the CPU, so many bytes, and twice as many while it is made.
REEF_API OptimizerState optimizer_state(const torch::optim::Optimizer& optimizer);

/// In place of what it kept: group by group, parameter by parameter in their order; names are not looked at.
/// Throws what the optimizer's load() does.
REEF_API void load_optimizer_state(torch::optim::Optimizer& optimizer, const OptimizerState& state);

REEF_API torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const OptimizerState& state);
REEF_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    OptimizerState& state);

}  // namespace reef
