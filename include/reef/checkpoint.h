#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "reef/export.h"

namespace reef {

struct CheckpointOptions {
  /// Hash every tensor that autograd saves, and compare when it is computed once more: RecomputeError if a
  /// value differs; not of uint8, as which kernels save their workspaces. Costs reading each of them twice
  /// (on a device, copying it to the host as well). Numbers, shapes and dtypes are always compared.
  bool check_values = false;
  /// Whose default generators `function` uses, besides the CPU's and those of its inputs' devices.
  std::vector<c10::Device> devices = {};
};

/// While one lives, what autograd saves on this thread is forgotten, and `function` is run once more, with
/// the same inputs, when backward wants the first of it. For those who cannot write checkpoint().
///
/// Holds the inputs, as autograd would: an outer region forgets them, too. `function` is called on the thread
/// that runs backward, at most once a pass, with the inputs detached and gradients recorded; it is ended by
/// an exception from within an operator as soon as all that was saved is there. Outside of grad mode the
/// region does nothing.
class REEF_API CheckpointRegion {
 public:
  CheckpointRegion(std::function<void(const std::vector<at::Tensor>&)> function,
                   const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {});
  ~CheckpointRegion();
  CheckpointRegion(const CheckpointRegion&) = delete;
  CheckpointRegion& operator=(const CheckpointRegion&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether what this thread runs is run once more, or measured by profile_chain(): what it writes into
/// tensors that were there is put back. For functions that do something else besides computing: count, log,
/// draw.
REEF_API bool is_undone();
/// Whether that is so of the innermost checkpointed function or stage of a chain that this thread runs: not
/// of one that is run first within another that is run once more.
REEF_API bool is_run_again();

/// function(inputs...), whose intermediate tensors are not kept for backward but computed once more there:
/// only the inputs are kept. The graph is the real one, so gradients are bit for bit those of the plain call,
/// of captured tensors and parameters as well, for any number of inputs and outputs, whether inputs require a
/// gradient or not; torch::autograd::grad, retained graphs, double backward, hooks and nested calls work.
///
///     auto y = reef::checkpoint([&](at::Tensor x) { return block->forward(x); }, x);
///
/// `function`, copied, must compute the same when it is called with the same tensors again: the states of the
/// default generators, autocast's settings and tensors that it reads and writes in place itself (running
/// averages) are those of the first run then, and what it writes is put back. Tensors that it reads besides
/// must not be modified until backward. Throws what `function` throws, and in backward RecomputeError, if
/// such a tensor was modified, or if the function carries a tensor from run to run that is not the same one.
/// Kept bytes: the inputs, of each saved tensor its shape, a copy of what it both reads and writes, and when
/// generators have been used, their states.
template <class Function, class... Inputs>
requires(std::is_convertible_v<Inputs, at::Tensor>&&...) auto checkpoint(const CheckpointOptions& options,
                                                                         Function function,
                                                                         const Inputs&... inputs) {
  const CheckpointRegion region(
      [function](const std::vector<at::Tensor>& again) mutable {
        [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
          static_cast<void>(function(again[kIndex]...));
        }
        (std::index_sequence_for<Inputs...>{});
      },
      {inputs...}, options);
  return function(inputs...);
}

template <class Function, class... Inputs>
requires(!std::is_same_v<std::remove_cvref_t<Function>, CheckpointOptions> &&
         (std::is_convertible_v<Inputs, at::Tensor> && ...)) auto checkpoint(Function function,
                                                                             const Inputs&... inputs) {
  return checkpoint(CheckpointOptions{}, std::move(function), inputs...);
}

/// The same for a function of a list.
template <class Function>
auto checkpoint(Function function, const std::vector<at::Tensor>& inputs,
                const CheckpointOptions& options = {}) {
  const CheckpointRegion region(
      [function](const std::vector<at::Tensor>& again) mutable { static_cast<void>(function(again)); },
      inputs, options);
  return function(inputs);
}

}  // namespace reef
