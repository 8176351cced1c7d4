#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <utility>

#include "checkpoint/captured.h"
#include "checkpoint/tape.h"
#include "checkpoint/writes_undone.h"
#include "reef/checkpoint.h"
#include "reef/ledger.h"
#include "surroundings.h"

namespace reef {

using at::Tensor;

struct CheckpointRegion::State {
  class Rerun;
  std::shared_ptr<Rerun> rerun;
  std::optional<SavedTensorScope> scope;
  std::optional<Captured::FirstRun> first;
};

/// What is needed to run the function once more. Lives as long as the graph has something of it.
class CheckpointRegion::State::Rerun {
 public:
  Rerun(std::function<void(const std::vector<Tensor>&)> function, const std::vector<Tensor>& inputs,
        const std::vector<c10::Device>& devices)
      : function_(std::move(function)), surroundings_(devices_of(inputs, devices)) {
    for (const Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  Surroundings& surroundings() { return surroundings_; }
  Captured& captured() { return captured_; }

  void fill(Tape& tape) {
    if (tape.is_whole()) return;
    std::vector<Tensor> inputs;
    for (const auto& saved : inputs_) {
      const Tensor input = saved.unpack();
      inputs.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad()) : input);
    }
    const SurroundingsScope as_then(surroundings_);
    const WritesUndone undone;
    const Captured::SecondRun finding(captured_, "checkpoint");
    const CategoryScope activations(Category::kActivation);
    tape.retake([&] { function_(inputs); }, Tape::Stop::kOnceWhole);
    undone.check();
  }

 private:
  std::function<void(const std::vector<Tensor>&)> function_;
  /// Made before the region begins: an outer region packs them.
  std::vector<torch::autograd::SavedVariable> inputs_;
  Surroundings surroundings_;
  Captured captured_;
};

CheckpointRegion::CheckpointRegion(std::function<void(const std::vector<Tensor>&)> function,
                                   const std::vector<Tensor>& inputs, const CheckpointOptions& options) {
  if (!at::GradMode::is_enabled()) return;
  auto rerun = std::make_shared<State::Rerun>(std::move(function), inputs, options.devices);
  auto tape = std::make_shared<Tape>("checkpoint", options.check_values);
  // The tape holds the rerun, and the graph holds the tape.
  tape->set_wanted([rerun, on = tape.get()] { rerun->fill(*on); });
  state_ = std::make_unique<State>();
  state_->rerun = std::move(rerun);
  state_->scope.emplace(Tape::recording(tape, Tape::Keep::kNothing));
  state_->first.emplace(state_->rerun->captured());
}

CheckpointRegion::~CheckpointRegion() {
  if (state_ == nullptr) return;
  state_->first.reset();
  state_->scope.reset();
  state_->rerun->surroundings().forget_unmoved_generators();
}

}  // namespace reef
