#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "optim/hyper.h"

/// States of parameters out of files: taken whole, or refused by name.
namespace reef::optim {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// How an optimizer keeps the state of one parameter.
struct StateLayout {
  std::string rule;
  std::vector<double> numbers;  ///< of OptimHyper
  std::string format;           ///< of this parameter: small ones are in float32
  std::string master;
  bool says_master = true;  ///< The file says how master weights are kept; torch's do not, and have none.
};

/// The master weights with which a state begins; undefined where none are kept.
at::Tensor begun_master(const at::Tensor& parameter, std::string_view master);

/// A saved state in this layout, as tensors of its own: codes and scales as they are, plain values of
/// parameters' shape encoded. States that the rule has under other options are kept, as torch keeps them.
/// Throws ConfigError that begins with `who`, if something is missing, unknown, or of another shape, dtype or
/// size: nothing is guessed, broadcast, or rounded that was not meant to be.
NamedTensors restored(const std::string& who, const StateLayout& layout, const at::Tensor& parameter,
                      const NamedTensors& saved);

}  // namespace reef::optim
