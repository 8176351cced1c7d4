#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "checkpoint/captured.h"
#include "checkpoint/run.h"
#include "checkpoint/run_meter.h"
#include "checkpoint/tape.h"
#include "checkpoint/tier_copy.h"
#include "checkpoint/writes_undone.h"
#include "observer/call.h"
#include "page/pager.h"
#include "reef/chain.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "surroundings.h"

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
  ScheduleRun(Chain chain, Schedule schedule, const Tensor& input, const CheckpointOptions& options,
              const std::shared_ptr<Tier>& tier, std::function<void(std::uint64_t)> needed)
      : chain_(std::move(chain)),
        schedule_(std::move(schedule)),
        input_(input, /*is_output=*/false),
        devices_(options.devices),
        stages_(chain_.size() + 2) {
    // Inside a budget its pager moves memory, and would move the same.
    if (tier && Pager::running(input.device()) == nullptr) lane_.emplace(tier, input.device());
    const auto slot = slot_of(input.device());
    if (needed && slot && Pager::running(input.device()) == nullptr) meter_.emplace(*slot, std::move(needed));
    const auto lock = std::make_shared<std::recursive_mutex>();
    for (std::uint32_t i = 1; i <= schedule_.stages; ++i) {
      stages_[i].tape = std::make_unique<Tape>(what(i), options.check_values, lock);
      stages_[i].tape->set_wanted([this, i] { advance_to(i); });
    }
  }

  Tensor forward(Tensor value) {
    const OperatorObservation observing = ObservedRun::observation();
    for (; schedule_.operations[position_].kind != Kind::kLoss; ++position_) {
      const ScheduleOp& op = schedule_.operations[position_];
      Stage& stage = stages_[op.stage];
      if (op.kind == Kind::kForward || op.kind == Kind::kTaped) {
        stage.input_requires_grad = value.requires_grad();
        stage.then.emplace(devices_of({value}, devices_));
        value = first(op, value);
        stage.then->forget_unmoved_generators();
        stage.output = value.detach();
        output_bytes_ = value.nbytes();
      } else {
        keep_house(op);
      }
    }
    ++position_;
    if (meter_) meter_->leave();
    return value;
  }

 private:
  struct Stage {
    std::unique_ptr<Tape> tape;
    Tensor output;  ///< while the schedule keeps it
    bool input_requires_grad = false;
    std::optional<Surroundings> then;
    Captured captured;
    std::unique_ptr<TierCopy> output_copy, tape_copy;
  };

  std::string what(std::uint32_t stage) const {
    return "run: stage " + std::to_string(stage) + " (" + chain_.name(stage - 1) + ")";
  }

  Tensor first(const ScheduleOp& op, const Tensor& value) {
    const auto keep = op.kind == Kind::kTaped ? Tape::Keep::kTensors : Tape::Keep::kNothing;
    const std::shared_ptr<Tape> tape(shared_from_this(),
                                     stages_[op.stage].tape.get());  // the graph holds all of this
    const SavedTensorScope scope(Tape::recording(tape, keep));
    const Captured::FirstRun finding(stages_[op.stage].captured);
    return chain_.run(op.stage - 1, value);
  }

  // What takes no time of the stages'.
  void keep_house(const ScheduleOp& op) {
    Stage& stage = stages_[op.stage];
    switch (op.kind) {
      case Kind::kDropOutput:
        stage.output.reset();
        return;
      case Kind::kBackward:
        stage.output_copy.reset();
        [[fallthrough]];
      case Kind::kDropTape:
        stage.tape_copy.reset();
        stage.tape->forget();
        return;
      case Kind::kOffloadOutput:
        if (lane_) stage.output_copy = copy({stage.output.storage()}, "the output of stage ", op.stage);
        return;
      case Kind::kOffloadTape:
        if (lane_) stage.tape_copy = copy(stage.tape->own_storages(), "the tape of stage ", op.stage);
        return;
      case Kind::kEvictOutput:
        evict(stage.output_copy, op.stage);
        return;
      case Kind::kEvictTape:
        evict(stage.tape_copy, op.stage);
        return;
      case Kind::kPrefetchOutput:
        if (stage.output_copy) stage.output_copy->prefetch();
        return;
      case Kind::kPrefetchTape:
        if (stage.tape_copy) stage.tape_copy->prefetch();
        return;
      default:
        return;
    }
  }

  std::unique_ptr<TierCopy> copy(std::vector<c10::Storage> storages, const char* what, std::uint32_t stage) {
    // Smaller ones cost more to move than their bytes are worth.
    std::erase_if(storages, [](const c10::Storage& storage) { return storage.nbytes() < 1024; });
    return std::make_unique<TierCopy>(
        *lane_, storages, "run: " + (what + std::to_string(stage)) + " (" + chain_.name(stage - 1) + ")");
  }
  void evict(const std::unique_ptr<TierCopy>& copy, std::uint32_t stage) const {
    if (!copy) return;
    copy->evict([&](const c10::StorageImpl& storage) {
      std::size_t references = 0;
      for (const std::uint32_t i : {stage, stage + 1}) {
        const Stage& of = stages_[i];
        if (of.tape) references += of.tape->references(storage);
        if (of.output.defined() && of.output.storage().unsafeGetStorageImpl() == &storage) ++references;
      }
      return references;
    });
  }
  void arrive(std::uint32_t output) const {
    if (stages_[output].output_copy) stages_[output].output_copy->arrive();
  }
  // All that backward of the stage uses.
  void arrive_for_backward(std::uint32_t stage) const {
    if (stages_[stage].tape_copy) stages_[stage].tape_copy->arrive();
    arrive(stage);
    arrive(stage - 1);
  }

  void advance_to(std::uint32_t stage) {
    if (meter_) meter_->come_back(output_bytes_);
    const ScheduleOp wanted{Kind::kBackward, stage};
    for (bool again = false; schedule_.operations[position_] != wanted; ++position_) {
      if (position_ + 1 == schedule_.operations.size() && !again) {
        again = true;
        begin_again();
      }
      const ScheduleOp& op = schedule_.operations[position_];
      if (op == wanted) break;
      if (op.kind == Kind::kForward || op.kind == Kind::kTaped || op.kind == Kind::kRetape) {
        once_more(op);
      } else {
        keep_house(op);
      }
    }
    arrive_for_backward(stage);
    if (meter_ && stage == 1) end_measurement();
  }

  // The first stage's backward pass is the last of the run's, if nothing is behind it.
  void end_measurement() {
    if (stages_[1].input_requires_grad || !in_backward()) {
      meter_->end();
      meter_.reset();
    } else if (!std::exchange(ends_, true)) {
      torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
        self->meter_->end();
        self->meter_.reset();
      });
    }
  }

  void begin_again() {
    position_ = 0;
    for (Stage& stage : stages_) {
      stage.output_copy.reset();
      stage.tape_copy.reset();
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
    arrive(op.stage - 1);
    const Tensor input = input_of(op.stage);
    const SurroundingsScope as_then(*stage.then);
    const WritesUndone undone;
    const Captured::SecondRun finding(stage.captured, what(op.stage));
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
  std::optional<TierLane> lane_;  ///< before what is copied by it
  std::vector<Stage> stages_;     ///< from 1; the last stands for the program
  std::size_t position_ = 0;      ///< of the next operation
  std::optional<RunMeter> meter_;
  std::uint64_t output_bytes_ = 0;
  bool ends_ = false;
};

// Sizes do not matter to whether it is legal.
void check_legal(const Chain& chain, const Schedule& schedule, bool has_tier) {
  ChainProfile profile;
  profile.tier_speed.bytes_per_second = 1;
  for (std::size_t i = 0; i < chain.size(); ++i) profile.stages.push_back({chain.name(i)});
  simulate(profile, schedule);
  const bool moves = std::any_of(schedule.operations.begin(), schedule.operations.end(), [](const auto& op) {
    return op.kind == Kind::kOffloadOutput || op.kind == Kind::kOffloadTape;
  });
  if (moves && !has_tier) {
    throw ConfigError(
        "run: the schedule moves outputs and tapes to a tier, and none was given; give the one that it was "
        "made for");
  }
}

}  // namespace

Tensor run(const Chain& chain, const Schedule& schedule, const Tensor& input,
           const CheckpointOptions& options, const std::shared_ptr<Tier>& tier) {
  return run_measured(chain, schedule, input, options, tier, {});
}

Tensor run_measured(const Chain& chain, const Schedule& schedule, const Tensor& input,
                    const CheckpointOptions& options, const std::shared_ptr<Tier>& tier,
                    std::function<void(std::uint64_t)> needed) {
  chain.check_current();
  check_legal(chain, schedule, tier != nullptr);
  if (!at::GradMode::is_enabled()) return chain(input);
  return std::make_shared<ScheduleRun>(chain, schedule, input, options, tier, std::move(needed))
      ->forward(input);
}

}  // namespace reef
