#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace reef {

/// While one lives, what autograd saves on this thread goes through the hooks that `make` gives, one for each
/// tensor; nullptr: it is saved as ever. The innermost scope holds, and Python's own hooks
/// (torch.autograd.graph.saved_tensors_hooks) where they are further in.
///
/// LibTorch asks its engine for such hooks, and Python's engine alone gives any. The first scope of a process
/// puts an engine before it that answers this question and passes all others on.
class SavedTensorScope {
 public:
  using Make = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;
  explicit SavedTensorScope(Make make);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;
};

}  // namespace reef
