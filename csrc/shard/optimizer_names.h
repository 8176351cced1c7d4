#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "reef/optimizer_state.h"

namespace torch::optim {
class OptimizerOptions;
class OptimizerParamState;
}  // namespace torch::optim

namespace reef {

/// The names of tensors that optimizers step, of parameters or of parts of them.
class SteppedNames {
 public:
  SteppedNames(const std::vector<at::Tensor>& tensors, const std::vector<std::string>& names);
  /// Throws ConfigError for a tensor that is none of them.
  const std::string& operator[](const at::Tensor& tensor) const;

 private:
  std::map<const c10::TensorImpl*, std::string> names_;
};

/// The optimizer's class, by which ranks compare what they step with.
std::string rule_of(const torch::optim::Optimizer& optimizer);

/// What an optimizer's groups are, with the names of what they step, and without states.
OptimizerState named_groups_of(const torch::optim::Optimizer& optimizer, const SteppedNames& names);

/// A copy of what it keeps, with these names; not of parts without elements, which others keep.
OptimizerState named_state_of(const torch::optim::Optimizer& optimizer, const SteppedNames& names);

/// What loading a state replaces, to be put back if that fails somewhere.
class KeptByOptimizer {
 public:
  explicit KeptByOptimizer(torch::optim::Optimizer& optimizer);
  ~KeptByOptimizer();
  KeptByOptimizer(const KeptByOptimizer&) = delete;
  KeptByOptimizer& operator=(const KeptByOptimizer&) = delete;
  void put_back(torch::optim::Optimizer& optimizer) const;

 private:
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> states_;
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

}  // namespace reef
