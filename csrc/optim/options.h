#pragma once

#include <ATen/ops/empty.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/hyper.h"
#include "optim/step.h"
#include "reef/optim.h"
#include "reef/part.h"

namespace reef::optim {

inline const OptionsBase& options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const OptionsBase&>(group.options());
}

inline std::unique_ptr<OptionsBase> cloned(const OptionsBase& options) {
  return std::unique_ptr<OptionsBase>(static_cast<OptionsBase*>(options.clone().release()));
}

/// What of these options no step could compute with. Throws ConfigError.
void check_options(const std::string& rule, const OptionsBase& options);
/// What torch asks of options only when they are given, not when a program changes them.
void check_nesterov(const std::string& rule, const OptionsBase& options);

/// Options of another class are other memory: throws ConfigError.
void check_class(const torch::optim::OptimizerParamGroup& group,
                 const torch::optim::OptimizerOptions& defaults);

/// Of a parameter, for a message.
std::string described(std::size_t group, std::size_t index, const at::Tensor& parameter);

/// The group's format by name; for a tensor, what the rule for small ones makes of it, the whole of a part.
inline std::string format_name(const OptionsBase& options) {
  return std::string(name(static_cast<kernels::OptimFormat>(options.get("state").toInt())));
}
inline std::string format_name(const OptionsBase& options, const at::Tensor& parameter) {
  const std::optional<Part> part = part_of(parameter);
  const std::int64_t elements = part ? part->whole_elements : parameter.numel();
  return elements < options.get("min_quantized_numel").toInt() ? "float32" : format_name(options);
}

inline std::string master_name(const OptionsBase& options) {
  return std::string(name(static_cast<kernels::OptimMaster>(options.get("master").toInt())));
}

inline std::string scale_name(const OptimStateName& state) { return std::string(state.name) + "_scale"; }

/// An operator's place for a tensor that there is not.
inline at::Tensor or_empty(const at::Tensor& tensor) { return tensor.defined() ? tensor : at::empty({0}); }

}  // namespace reef::optim
