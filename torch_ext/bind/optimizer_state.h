#pragma once

#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <utility>

#include "reef/optimizer_state.h"

namespace reef::bind {

/// An optimizer's state that has been found to be one: made before ranks wait for each other.
struct OptimizerState : torch::CustomClassHolder {
  explicit OptimizerState(reef::OptimizerState given) : state(std::move(given)) {}
  reef::OptimizerState state;
};

/// What Python makes of an optimizer's state_dict, and takes (reef/shard_state.py): tuples in tuples.
reef::OptimizerState state_of(const c10::IValue& data);
reef::OptimizerState::Communication communication_of(const c10::IValue& data);
c10::IValue data_of(const reef::OptimizerState& state);
c10::IValue data_of(const reef::OptimizerState::Communication& communication);

}  // namespace reef::bind
