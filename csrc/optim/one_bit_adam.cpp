#include "optim/one_bit_adam.h"

#include <limits>
#include <memory>
#include <sstream>
#include <string>

#include "given_momentum.h"
#include "reef/error.h"

namespace reef::optim {

using at::Tensor;

void check_exchange(std::string_view rule, std::string_view state, const OptimHyper& hyper,
                    at::TensorList parameters) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto momentum = given_momentum_of(parameters[i]);
    const auto refuse = [&](const std::string& what) {
      throw ConfigError(std::string(rule) + ": parameter " + std::to_string(i) + " " + what);
    };
    if (!is_one_bit_adam(rule)) {
      if (momentum != nullptr)
        refuse(
            "is of a shard with compression one_bit_adam, whose gradients become a momentum after the "
            "warm-up; make an optim::OneBitAdam of its parameters, or shard with another compression");
      continue;
    }
    if (momentum == nullptr)
      refuse(
          "is of no shard with compression one_bit_adam, which makes the momentum; give parameters() of such "
          "a shard, while it is there, or take AdamW");
    if (hyper.beta1 != momentum->beta1) {
      refuse("has a beta1 of " + std::to_string(hyper.beta1) + ", and the compression of its shard one of " +
             std::to_string(momentum->beta1) + "; give both the same");
    }
    if (state != "float32")
      refuse("has states in " + std::string(state) +
             ", and a second moment that stays as it is must not be rounded; give float32");
    if (hyper.amsgrad != 0) refuse("has amsgrad, which this rule has not; leave it out");
    momentum->has_optimizer = true;
  }
}

namespace {

std::shared_ptr<GivenMomentum> record_of(const Tensor& parameter) {
  auto momentum = given_momentum_of(parameter);
  if (momentum != nullptr) return momentum;
  throw ConfigError(
      "one_bit_adam: a parameter is of no shard with compression one_bit_adam; give parameters() of such a "
      "shard, while it is there");
}

}  // namespace

void check_given(bool has_states, at::TensorList parameters, at::TensorList gradients) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto momentum = record_of(parameters[i]);
    if (momentum->is_given && !has_states) {
      throw ConfigError(
          "one_bit_adam: the warm-up is over, and this optimizer has no second moment of any parameter, so "
          "no momentum would step one: make it before the warm-up, or load its state "
          "(load_optimizer_state() of the shard)");
    }
    if (momentum->has_noted(parameters[i], gradients[i])) continue;
    std::ostringstream shape;
    shape << parameters[i].sizes();
    throw ConfigError(
        "one_bit_adam: the gradient of a parameter of shape " + shape.str() +
        " is not what the last pass that was reduced has given it, and the momentum that ranks remember is "
        "of that: between this pass and the step change no gradient, by clipping, a scale or otherwise");
  }
}

bool gets_momentum(const Tensor& parameter) { return record_of(parameter)->is_given; }

void step_by_momentum(const OptimHyper& hyper, kernels::OptimConstants& constants) {
  constants.gain1 = 1;
  constants.decay2 = 1;
  constants.gain2 = 0;
  constants.rate = static_cast<float>(-hyper.lr);
  constants.correction = 1;
}

void hold_without_moment(const Tensor& second) {
  if (second.numel() == 0 || second.min().item<float>() > 0) return;
  second.masked_fill_(second.eq(0), std::numeric_limits<float>::infinity());
}

}  // namespace reef::optim
