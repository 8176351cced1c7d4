// What runs a pipeline: step(), train(), forward() and generate().
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "distributed/members.h"
#include "pipeline_run/micro_batches.h"
#include "pipeline_run/options.h"
#include "pipeline_run/pipeline_parts.h"
#include "pipeline_run/tied.h"
#include "pipeline_run/training.h"
#include "reef/error.h"
#include "shard/together.h"

namespace reef {
namespace {

using at::Tensor;
using Tensors = PipelineStage::Tensors;

constexpr const char* kTrain = "reef::Pipeline::train";
constexpr const char* kNumberOfBatches = "the number of batches";

bool trains(const PipelineSchedule& schedule) {
  return std::any_of(
      schedule.actions.front().begin(), schedule.actions.front().end(),
      [](const PipelineAction& action) { return action.kind != PipelineAction::Kind::kForward; });
}

/// What a training run begins backward at, which is the loss. Keeps it.
Tensors ends_of(const Tensor& loss, Tensor& kept) {
  check_loss(loss, "reef::Pipeline");
  if (!loss.requires_grad())
    throw ConfigError(
        "reef::Pipeline: the loss depends on nothing that requires grad, so there would be no gradients: "
        "it is detached, or made by operators that are not differentiable, or all before it is frozen.");
  kept = loss.detach();
  return {loss.reshape({})};
}

}  // namespace

void Pipeline::Parts::note(const std::string& call) const {
  if (runs)
    throw ConfigError(call +
                      " was called by a stage, a loss or an update of this pipeline, while the other "
                      "ranks are elsewhere: call it when the pipeline's call has returned.");
  note_call(*group, call);
}

PipelineExecutor::Run Pipeline::Parts::begin(const char* call) {
  note(call);
  if (!uneven.empty())
    throw ConfigError(
        std::string(call) + ": a call of train() has failed when " + uneven +
        ", so the chunks are not of one model: load states of it (load_state_dict), and of its optimizers.");
  PipelineExecutor::Run run;
  run.course = &executor->serving();
  run.seed = {options.seed, calls++, executor->replica() * micro_batches(), micro_batches()};
  run.settle = [this] { parameters->settle(); };
  run.failed = [this] { parameters->tell_failed(); };
  run.meanwhile = parameters->while_waiting();
  return run;
}

std::vector<std::string> Pipeline::Parts::run(const PipelineExecutor::Run& run,
                                              const std::function<void()>& when_failed) {
  struct Running {
    explicit Running(bool& given) : flag(given) { flag = true; }
    ~Running() { flag = false; }
    bool& flag;
  };
  parameters->use();
  const Running running(runs);
  try {
    return executor->run(run);
  } catch (const RankFailed&) {
    throw;
  } catch (const RanksOutOfStep&) {
    throw;
  } catch (...) {
    parameters->leave_out();
    when_failed();
    throw;
  }
}

Tensor Pipeline::step(const Tensors& batch, const LossOfList& loss) {
  return parts_->step(
      "reef::Pipeline::step", [&] { return batch; }, loss);
}

Tensor Pipeline::Parts::step(const char* call, const std::function<Tensors()>& batch,
                             const LossOfList& loss) {
  if (schedule().versions.kind != PipelineVersionRule::Kind::kFlush)
    throw ConfigError(std::string(call) + ": schedule '" + schedule().name +
                      "' is asynchronous and updates weights by itself: use train().");
  if (!trains(schedule()))
    throw ConfigError(std::string(call) + ": schedule '" + schedule().name +
                      "' has no backward passes: it is for forward() only.");
  const at::AutoGradMode records(true);
  const std::uint32_t count = micro_batches(), replicas = options.replicas;
  std::vector<Tensor> losses(count);
  PipelineExecutor::Run run = begin(call);
  run.course = &executor->training();
  run.trains = true;
  run.input = cut_each_batch([&](std::uint32_t) { return batch(); }, count);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) {
    return ends_of(loss(outputs, micro_batch), losses[micro_batch]);
  };
  run.report = [&] {
    parameters->check();
    check_no_hooks(used_by_several_chunks);
    return text_of_losses(losses, count, executor->replica(), replicas);
  };
  PipelineParameters::OfCall gradients(*parameters);
  const std::vector<Tensor> sums = sums_of_losses(this->run(run), count * replicas);
  const std::int64_t divisor = this->divisor(count);
  gradients.add(divisor);
  return divisor == 1 ? sums.front() : sums.front() / divisor;
}

Tensor Pipeline::train(std::uint32_t batches, const Batches& batch, const LossOfBatch& loss,
                       const std::function<void()>& update) {
  const at::AutoGradMode records(true);
  Parts& parts = *parts_;
  if (parts.trains_by_steps()) return parts.train_by_steps(batches, batch, loss, update);
  const std::uint32_t count = micro_batches_of_batch();
  PipelineExecutor::Run run = parts.begin(kTrain);
  run.seed.micro_batches_per_call = count;
  run.seed.first_micro_batch = parts.executor->replica() * count;
  std::optional<PipelineCourse> course;
  Together together(parts.group, c10::kCPU);
  together.here([&] {
    if (!parts.parameters->steps_chunks())
      throw ConfigError(
          "reef::Pipeline::train: by asynchronous schedules, chunks' parameters are not sharded and not "
          "shared by other chunks: take a synchronous one.");
    course.emplace(parts.executor->course(train_schedule(batches)));
  });
  together.agree_on(kNumberOfBatches, std::to_string(batches));
  PipelineTraining training(parts.executor->chunks(), *parts.parameters, course->schedule(),
                            {update, parts.options.replicas, parts.options.reduction == Reduction::kMean,
                             parts.options.correction_decay});
  parts.calls += batches - 1;  // each has the random numbers of a call
  std::vector<Tensor> losses(course->schedule().micro_batches);
  run.course = &*course;
  run.trains = true;
  run.input = cut_each_batch(batch, count);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) {
    return ends_of(loss(outputs, micro_batch / count, micro_batch % count), losses[micro_batch]);
  };
  run.update = [&](std::uint32_t chunk, std::uint32_t micro_batch) { training.update(chunk, micro_batch); };
  run.leave_update = [&](std::uint32_t chunk, std::uint32_t micro_batch, const std::string& why) {
    training.leave(chunk, micro_batch, why);
  };
  run.report = [&] {
    return text_of_losses(losses, count, parts.executor->replica(), parts.options.replicas);
  };
  const PipelineParameters::OfCall gradients(*parts.parameters);
  const std::vector<std::string> reports = parts.run(
      run, [&] { parts.uneven = training.uneven(gather_texts(training.updates(), parts.group, c10::kCPU)); });
  parts.trained_batches += batches;
  const Tensor sums = at::stack(sums_of_losses(reports, count * parts.options.replicas));
  return sums / parts.divisor(count);
}

Tensor Pipeline::Parts::train_by_steps(std::uint32_t batches, const Batches& batch, const LossOfBatch& loss,
                                       const std::function<void()>& update) {
  note(kTrain);
  Together together(group, c10::kCPU);
  together.here([&] { check_batches(batches, micro_batches()); });
  together.agree_on(kNumberOfBatches, std::to_string(batches));
  const PipelineParameters::OfCall gradients_before(*parameters);
  std::vector<Tensor> losses;
  for (std::uint32_t number = 0; number < batches; ++number) {
    losses.push_back(step(
        kTrain, [&] { return batch(number); },
        [&](const Tensors& outputs, std::uint32_t micro_batch) {
          return loss(outputs, number, micro_batch);
        }));
    uneven = "the update by batch " + std::to_string(number) + " had not been made on all ranks";
    together.here(update);
    together.agree();
    uneven.clear();
    parameters->drop_gradients();
  }
  return at::stack(losses);
}

std::uint32_t Pipeline::micro_batches_of_batch() const { return reef::micro_batches_of_batch(schedule()); }
PipelineSchedule Pipeline::train_schedule(std::uint32_t batches) const {
  return training_schedule(parts_->options, schedule(), batches, parts_->trained_batches);
}

Tensor Pipeline::step(const Tensor& batch, const Loss& loss) {
  return step(Tensors{batch}, [&](const Tensors& outputs, std::uint32_t micro_batch) {
    if (outputs.size() != 1)
      throw ConfigError("reef::Pipeline: the last stage has " + std::to_string(outputs.size()) +
                        " outputs: give step() a list, and a loss of lists.");
    return loss(outputs.front(), micro_batch);
  });
}

Tensors Pipeline::forward(const Tensors& batch) {
  const at::NoGradGuard no_grad;
  Parts& parts = *parts_;
  std::vector<Tensors> outputs(parts.micro_batches());
  PipelineExecutor::Run run = parts.begin("reef::Pipeline::forward");
  run.input = cut_each_batch([&](std::uint32_t) { return batch; }, parts.micro_batches());
  run.finish = [&](std::uint32_t micro_batch, const Tensors& made) -> Tensors {
    outputs[micro_batch] = made;
    return {};
  };
  run.report = [] { return std::string(); };
  parts.run(run);
  Tensors whole;
  for (std::size_t i = 0; i < outputs.front().size(); ++i) {
    Tensors rows;
    for (const Tensors& each : outputs) rows.push_back(each.at(i));
    whole.push_back(at::cat(rows));
  }
  return whole;
}

void Pipeline::generate(const std::vector<Tensors>& starts, std::uint32_t steps, const Next& next) {
  const at::NoGradGuard no_grad;
  Parts& parts = *parts_;
  const std::uint32_t lanes = parts.micro_batches();
  const PipelineCourse course =
      parts.executor->course(repeated(parts.executor->serving().schedule(), steps), lanes);
  PipelineExecutor::Run run = parts.begin("reef::Pipeline::generate");
  parts.calls += steps - 1;  // each has the random numbers of a call
  run.course = &course;
  run.input = [&](std::uint32_t lane) {
    if (starts.size() != lanes)
      throw ConfigError("reef::Pipeline::generate was given " + std::to_string(starts.size()) +
                        " lanes, and the pipeline has " + std::to_string(lanes) +
                        " micro-batches: give as many.");
    return starts[lane];
  };
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) {
    return next(outputs, micro_batch % lanes, micro_batch / lanes);
  };
  run.report = [] { return std::string(); };
  parts.run(run);
}

Tensor Pipeline::forward(const Tensor& batch) {
  const Tensors outputs = forward(Tensors{batch});
  return outputs.empty() ? Tensor() : outputs.front();
}

}  // namespace reef
