#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/optim_step.h"

namespace reef::optim {

/// An optimizer's numbers for one group, in the order in which the operator takes them. Flags are 0 or 1.
struct OptimHyper {
  double lr = 0;
  double beta1 = 0;  ///< or the momentum
  double beta2 = 0;  ///< or RMSprop's alpha
  double eps = 0;
  double weight_decay = 0;
  double dampening = 0;
  double lr_decay = 0;
  double trust_coefficient = 0;
  double decoupled = 0;  ///< the parameter decays, not the gradient
  double amsgrad = 0;
  double nesterov = 0;
  double centered = 0;
  double maximize = 0;

  static constexpr std::size_t kNumbers = 13;
  static OptimHyper of(const std::vector<double>& numbers);
  std::vector<double> numbers() const;
};

/// A rule of the operator by name ("adam", "sgd", "lion", "rmsprop", "adagrad", "lamb", "lars",
/// "one_bit_adam") and what of it these numbers ask for. Throws ConfigError.
kernels::OptimRule optim_rule(std::string_view name, const OptimHyper& hyper);

/// The states of a rule, in order: torch's names where it has them.
struct OptimStateName {
  const char* name;
  bool is_signed;
};
std::vector<OptimStateName> optim_states(kernels::OptimRule rule);
std::vector<OptimStateName> optim_states(std::string_view rule, const std::vector<double>& numbers);
/// All that a rule keeps under any numbers: states of an option that was switched off stay.
std::vector<OptimStateName> optim_states_at_most(std::string_view rule);
/// A state that is missing begins when a step first needs it, as the gradient of that step. Others must be
/// there from the first step on, as in torch.
constexpr bool may_begin_later(std::string_view rule) { return rule == "sgd"; }

/// What the kernel of `rule` computes with in step number `step`, the first being 1; the trust ratio and the
/// gradient's factor are left as they are. In double, rounded once. `begins`: a momentum begins with this
/// step's gradient, as it does in the first.
kernels::OptimConstants optim_constants(kernels::OptimRule rule, const OptimHyper& hyper, double step,
                                        bool begins);

/// LAMB and LARS: a step needs norms of whole parameters.
constexpr bool needs_norms(kernels::OptimRule rule) {
  return rule == kernels::OptimRule::kLamb || rule == kernels::OptimRule::kLars;
}
/// Their trust ratio; 1 where a norm is 0.
double optim_trust(kernels::OptimRule rule, const OptimHyper& hyper, double parameter_norm,
                   double measured_norm);

}  // namespace reef::optim
