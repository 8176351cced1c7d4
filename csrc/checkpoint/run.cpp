#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "checkpoint/surroundings.h"
#include "checkpoint/tape.h"
#include "checkpoint/writes_undone.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {
namespace {

using at::Tensor;
using Kind = ScheduleOp::Kind;

/// Forgets what is saved: of a forward pass whose tape nobody wants.
class Forgotten final : public torch::autograd::SavedVariableHooks {
 public:
  void call_pack_hook(const Tensor&) override {}
  Tensor call_unpack_hook() override {
    throw RecomputeError(
        "run: a stage goes backward inside its own forward pass, which a schedule does not know of; "
        "call checkpoint() for it instead");
  }
};

/// Executes a schedule: up to the loss in the forward call, and then as far as the stage whose tape backward
/// wants. Operations before the loss are executed anew if a second pass of backward comes. Lives as long as
/// the graph has something of it.
class ScheduleRun : public std::enable_shared_from_this<ScheduleRun> {
 public:
  ScheduleRun(Chain chain, Schedule schedule, const Tensor& input, const CheckpointOptions& options)
      : chain_(std::move(chain)),
        schedule_(std::move(schedule)),
        input_(input, /*is_output=*/false),
        devices_(options.devices),
        stages_(chain_.size() + 1) {
    const auto lock = std::make_shared<std::recursive_mutex>();
    for (std::uint32_t i = 1; i <= schedule_.stages; ++i) {
      stages_[i].tape = std::make_unique<Tape>(
          "run: stage " + std::to_string(i) + " (" + chain_.name(i - 1) + ")", options.check_values, lock);
      stages_[i].tape->set_wanted([this, i] { advance_to(i); });
    }
  }

  Tensor forward(Tensor value) {
    for (; schedule_.operations[position_].kind != Kind::kLoss; ++position_) {
      const ScheduleOp& op = schedule_.operations[position_];
      Stage& stage = stages_[op.stage];
      if (op.kind == Kind::kForward || op.kind == Kind::kTaped) {
        stage.input_requires_grad = value.requires_grad();
        stage.then.emplace(devices_of({value}, devices_));
        value = first(op, value);
        stage.then->forget_unmoved_generators();
        stage.output = value.detach();
      } else {
        drop(op);
      }
    }
    ++position_;
    return value;
  }

 private:
  struct Stage {
    std::unique_ptr<Tape> tape;
    Tensor output;  ///< while the schedule keeps it
    bool input_requires_grad = false;
    std::optional<Surroundings> then;
  };

  Tensor first(const ScheduleOp& op, const Tensor& value) {
    const auto keep = op.kind == Kind::kTaped ? Tape::Keep::kTensors : Tape::Keep::kNothing;
    const std::shared_ptr<Tape> tape(shared_from_this(),
                                     stages_[op.stage].tape.get());  // the graph holds all of this
    const SavedTensorScope scope(Tape::recording(tape, keep));
    return chain_.run(op.stage - 1, value);
  }

  void drop(const ScheduleOp& op) {
    if (op.kind == Kind::kDropOutput) stages_[op.stage].output.reset();
    if (op.kind == Kind::kDropTape || op.kind == Kind::kBackward) stages_[op.stage].tape->forget();
  }

  void advance_to(std::uint32_t stage) {
    const ScheduleOp wanted{Kind::kBackward, stage};
    for (bool again = false; schedule_.operations[position_] != wanted; ++position_) {
      if (position_ + 1 == schedule_.operations.size() && !again) {
        again = true;
        begin_again();
      }
      const ScheduleOp& op = schedule_.operations[position_];
      if (op == wanted) return;
      if (op.kind == Kind::kForward || op.kind == Kind::kTaped || op.kind == Kind::kRetape) {
        once_more(op);
      } else {
        drop(op);
      }
    }
  }

  void begin_again() {
    position_ = 0;
    for (Stage& stage : stages_) {
      stage.output.reset();
      if (stage.tape) stage.tape->forget();
    }
  }

  Tensor input_of(std::uint32_t stage) const {
    const Tensor input = stage == 1 ? input_.unpack() : stages_[stage - 1].output;
    return input.detach().requires_grad_(stages_[stage].input_requires_grad);
  }

  // In grad mode, whatever is kept: without it, operators may choose other kernels.
  void once_more(const ScheduleOp& op) {
    Stage& stage = stages_[op.stage];
    const Tensor input = input_of(op.stage);
    const SurroundingsScope as_then(*stage.then);
    const WritesUndone undone;
    const CategoryScope activations(Category::kActivation);
    const at::AutoGradMode grad_mode(true);
    if (op.kind == Kind::kForward) {
      const SavedTensorScope forgetting([] { return std::make_unique<Forgotten>(); });
      stage.output = chain_.run(op.stage - 1, input).detach();
      return;
    }
    Tensor output;
    stage.tape->retake([&] { output = chain_.run(op.stage - 1, input).detach(); },
                       op.kind == Kind::kRetape ? Tape::Stop::kOnceWhole : Tape::Stop::kAtItsEnd);
    if (op.kind == Kind::kTaped) stage.output = std::move(output);
  }

  Chain chain_;
  Schedule schedule_;
  torch::autograd::SavedVariable input_;  ///< made before a scope begins: an outer region packs it
  std::vector<c10::Device> devices_;
  std::vector<Stage> stages_;  ///< from 1
  std::size_t position_ = 0;   ///< of the next operation
};

// Sizes do not matter to whether it is legal.
void check_legal(const Chain& chain, const Schedule& schedule) {
  ChainProfile profile;
  for (std::size_t i = 0; i < chain.size(); ++i) profile.stages.push_back({chain.name(i)});
  simulate(profile, schedule);
}

}  // namespace

Tensor run(const Chain& chain, const Schedule& schedule, const Tensor& input,
           const CheckpointOptions& options) {
  check_legal(chain, schedule);
  if (!at::GradMode::is_enabled()) return chain(input);
  return std::make_shared<ScheduleRun>(chain, schedule, input, options)->forward(input);
}

}  // namespace reef
