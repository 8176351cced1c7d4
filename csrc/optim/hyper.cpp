#include "optim/hyper.h"

#include <cmath>

#include "reef/error.h"

namespace reef::optim {

using kernels::OptimConstants;
using kernels::OptimRule;

namespace {

constexpr double OptimHyper::*kFields[OptimHyper::kNumbers] = {
    &OptimHyper::lr,           &OptimHyper::beta1,     &OptimHyper::beta2,    &OptimHyper::eps,
    &OptimHyper::weight_decay, &OptimHyper::dampening, &OptimHyper::lr_decay, &OptimHyper::trust_coefficient,
    &OptimHyper::decoupled,    &OptimHyper::amsgrad,   &OptimHyper::nesterov, &OptimHyper::centered,
    &OptimHyper::maximize};

}  // namespace

OptimHyper OptimHyper::of(const std::vector<double>& numbers) {
  if (numbers.size() != kNumbers) {
    throw ConfigError("optim_step_ takes " + std::to_string(kNumbers) + " numbers, not " +
                      std::to_string(numbers.size()));
  }
  OptimHyper hyper;
  for (std::size_t i = 0; i < kNumbers; ++i) hyper.*kFields[i] = numbers[i];
  return hyper;
}

std::vector<double> OptimHyper::numbers() const {
  std::vector<double> numbers;
  for (const auto field : kFields) numbers.push_back(this->*field);
  return numbers;
}

OptimRule optim_rule(std::string_view name, const OptimHyper& hyper) {
  if (name == "adam") return hyper.amsgrad != 0 ? OptimRule::kAdamMaximum : OptimRule::kAdam;
  if (name == "sgd") return hyper.beta1 != 0 ? OptimRule::kMomentum : OptimRule::kSgd;
  if (name == "lion") return OptimRule::kLion;
  if (name == "rmsprop") {
    const bool momentum = hyper.beta1 != 0;
    if (hyper.centered != 0)
      return momentum ? OptimRule::kRmspropCenteredMomentum : OptimRule::kRmspropCentered;
    return momentum ? OptimRule::kRmspropMomentum : OptimRule::kRmsprop;
  }
  if (name == "adagrad") return OptimRule::kAdagrad;
  if (name == "lamb") return OptimRule::kLamb;
  if (name == "lars") return OptimRule::kLars;
  if (name == "one_bit_adam") return OptimRule::kAdam;
  throw ConfigError("'" + std::string(name) +
                    "' is no rule; use one of adam, sgd, lion, rmsprop, adagrad, lamb, lars, one_bit_adam");
}

std::vector<OptimStateName> optim_states(OptimRule rule) {
  switch (rule) {
    case OptimRule::kAdam:
    case OptimRule::kLamb:
      return {{"exp_avg", true}, {"exp_avg_sq", false}};
    case OptimRule::kAdamMaximum:
      return {{"exp_avg", true}, {"exp_avg_sq", false}, {"max_exp_avg_sq", false}};
    case OptimRule::kSgd:
      return {};
    case OptimRule::kMomentum:
    case OptimRule::kLars:
      return {{"momentum_buffer", true}};
    case OptimRule::kLion:
      return {{"exp_avg", true}};
    case OptimRule::kRmsprop:
      return {{"square_avg", false}};
    case OptimRule::kRmspropMomentum:
      return {{"square_avg", false}, {"momentum_buffer", true}};
    case OptimRule::kRmspropCentered:
      return {{"square_avg", false}, {"grad_avg", true}};
    case OptimRule::kRmspropCenteredMomentum:
      return {{"square_avg", false}, {"grad_avg", true}, {"momentum_buffer", true}};
    case OptimRule::kAdagrad:
      return {{"sum", false}};
  }
  return {};
}

std::vector<OptimStateName> optim_states(std::string_view rule, const std::vector<double>& numbers) {
  return optim_states(optim_rule(rule, OptimHyper::of(numbers)));
}

std::vector<OptimStateName> optim_states_at_most(std::string_view rule) {
  OptimHyper all;
  all.amsgrad = all.centered = all.beta1 = 1;
  return optim_states(optim_rule(rule, all));
}

OptimConstants optim_constants(OptimRule rule, const OptimHyper& hyper, double step, bool begins) {
  OptimConstants c;
  const auto set = [](float& constant, double value) { constant = static_cast<float>(value); };
  set(c.eps, hyper.eps);
  set(c.decay1, hyper.beta1);
  set(c.gain1, 1 - hyper.beta1);
  set(c.decay2, hyper.beta2);
  set(c.gain2, 1 - hyper.beta2);
  set(c.rate, -hyper.lr);
  if (hyper.decoupled != 0) {
    set(c.kept, 1 - hyper.lr * hyper.weight_decay);
  } else {
    set(c.coupled_decay, hyper.weight_decay);
  }
  switch (rule) {
    case OptimRule::kAdam:
    case OptimRule::kAdamMaximum:
      set(c.rate, -(hyper.lr / (1 - std::pow(hyper.beta1, step))));
      set(c.correction, std::sqrt(1 - std::pow(hyper.beta2, step)));
      break;
    case OptimRule::kLamb:
      c.coupled_decay = 0;
      c.kept = 1;
      set(c.decoupled_decay, hyper.weight_decay);
      set(c.correction1, 1 - std::pow(hyper.beta1, step));
      set(c.correction, std::sqrt(1 - std::pow(hyper.beta2, step)));
      break;
    case OptimRule::kMomentum:
    case OptimRule::kLars:
      c.first = begins || step <= 1;
      c.nesterov = hyper.nesterov != 0;
      set(c.gain1, 1 - hyper.dampening);
      break;
    case OptimRule::kAdagrad:
      set(c.rate, -(hyper.lr / (1 + (step - 1) * hyper.lr_decay)));
      break;
    case OptimRule::kSgd:
    case OptimRule::kLion:
    case OptimRule::kRmsprop:
    case OptimRule::kRmspropMomentum:
    case OptimRule::kRmspropCentered:
    case OptimRule::kRmspropCenteredMomentum:
      break;
  }
  return c;
}

double optim_trust(OptimRule rule, const OptimHyper& hyper, double parameter_norm, double measured_norm) {
  if (parameter_norm == 0 || measured_norm == 0) return 1;
  if (rule == OptimRule::kLamb) return parameter_norm / measured_norm;
  return hyper.trust_coefficient * parameter_norm /
         (measured_norm + hyper.weight_decay * parameter_norm + hyper.eps);
}

}  // namespace reef::optim
