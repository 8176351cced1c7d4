#include "reef/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/group_tags.h"
#include "distributed/members.h"
#include "pipeline_run/executor.h"
#include "pipeline_run/options.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Tensors = PipelineStage::Tensors;
using Named = std::vector<std::pair<std::string, Tensor>>;

PipelineStage stage_of(const std::string& name, torch::nn::AnyModule module) {
  PipelineStage stage;
  for (const auto& each : module.ptr()->named_parameters())
    stage.parameters.emplace_back(name + "." + each.key(), each.value());
  stage.run = [module](const Tensors& inputs) mutable -> Tensors {
    if (inputs.size() != 1)
      throw ConfigError("reef::Pipeline: a stage of a Sequential takes one tensor, and was given " +
                        std::to_string(inputs.size()) + "; make stages of your own for more.");
    return {module.forward(inputs.front())};
  };
  return stage;
}

std::vector<PipelineStage> stages_of(const torch::nn::Sequential& modules) {
  std::vector<PipelineStage> stages;
  const auto children = modules->named_children();
  auto module = modules->begin();
  for (std::size_t i = 0; i < modules->size(); ++i) stages.push_back(stage_of(children[i].key(), *module++));
  return stages;
}

std::vector<Pipeline::Maker> makers_of(const std::vector<PipelineStage>& stages) {
  std::vector<Pipeline::Maker> makers;
  for (const PipelineStage& stage : stages) makers.emplace_back([stage] { return stage; });
  return makers;
}

/// Adds those that are not there yet: stages may share parameters.
void add_new(const Named& parameters, Named& all) {
  for (const auto& each : parameters) {
    const auto is_same = [&](const auto& known) { return known.second.is_same(each.second); };
    if (std::none_of(all.begin(), all.end(), is_same)) all.push_back(each);
  }
}

/// Cuts tensors along dimension 0. Throws ConfigError if they differ in it, or have too few rows.
std::vector<Tensors> micro_batches_of(const Tensors& batch, std::uint32_t count) {
  std::vector<Tensors> parts(count);
  std::int64_t rows = -1;
  for (const Tensor& tensor : batch) {
    if (!tensor.defined() || tensor.dim() == 0)
      throw ConfigError(
          "reef::Pipeline: the rank with the first stage needs a batch whose tensors have rows.");
    if (rows < 0) rows = tensor.size(0);
    if (tensor.size(0) != rows || rows < count)
      throw ConfigError("reef::Pipeline: a batch of " + std::to_string(tensor.size(0)) +
                        " rows cannot be cut into " + std::to_string(count) +
                        " micro-batches: give one row for each at least, and as many in every tensor.");
    const std::vector<Tensor> cut = tensor.tensor_split(count);
    for (std::uint32_t part = 0; part < count; ++part) parts[part].push_back(cut[part]);
  }
  if (rows < 0) throw ConfigError("reef::Pipeline: the rank with the first stage was given no batch.");
  return parts;
}

/// Returns a function that gives a batch's micro-batches, which is cut when the first of them is wanted: on
/// the rank that has the first stage, in the run, so that what is wrong with the batch fails the run.
std::function<Tensors(std::uint32_t)> cutter(const Tensors& batch, std::uint32_t count) {
  return [given = batch, count, parts = std::vector<Tensors>()](std::uint32_t micro_batch) mutable {
    if (parts.empty()) parts = micro_batches_of(std::exchange(given, {}), count);
    return std::move(parts[micro_batch]);
  };
}

/// Sets gradients aside, so that those of a call are apart from them until it has succeeded.
class GradientsAside {
 public:
  explicit GradientsAside(const Named& parameters) {
    for (const auto& [name, parameter] : parameters) {
      aside_.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
  ~GradientsAside() {
    for (auto& [parameter, before] : aside_) parameter.mutable_grad() = before;
  }
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;

  /// Adds the call's gradients, divided by `divisor`, to those that there were.
  void add(std::int64_t divisor) {
    const at::NoGradGuard no_grad;
    for (auto& [parameter, before] : aside_) {
      Tensor& made = parameter.mutable_grad();
      if (!made.defined()) continue;
      if (divisor != 1) made.div_(divisor);
      before = before.defined() ? before.add_(made) : made;
    }
  }

 private:
  std::vector<std::pair<Tensor, Tensor>> aside_;  ///< parameters, and their gradients before
};

bool trains(const PipelineSchedule& schedule) {
  return std::any_of(
      schedule.actions.front().begin(), schedule.actions.front().end(),
      [](const PipelineAction& action) { return action.kind != PipelineAction::Kind::kForward; });
}

constexpr std::size_t kLossBytes = sizeof(double) + 1;

std::string text_of_loss(const Tensor& loss) {
  const double value = loss.item<double>();
  std::string text(kLossBytes, static_cast<char>(loss.scalar_type()));
  std::memcpy(text.data() + 1, &value, sizeof value);
  return text;
}
Tensor loss_in(const std::string& text) {
  double value = 0;
  std::memcpy(&value, text.data() + 1, sizeof value);
  return at::full({}, value, static_cast<at::ScalarType>(text.front()));
}

}  // namespace

struct Pipeline::State {
  static std::unique_ptr<State> make(const std::vector<Maker>& stages, const ProcessGroupPtr& group,
                                     const PipelineOptions& options, bool whole);

  ProcessGroupPtr group;
  PipelineOptions options;
  PipelineCuts cuts;
  GroupTags numbers;
  std::unique_ptr<PipelineExecutor> executor;
  Named parameters;
  std::uint64_t calls = 0;

  std::size_t rank_of_last() const { return executor->schedule().rank_of.front().back(); }
};

/// `whole`: makers are called for the stages of all ranks, which are there anyway, so that weights that
/// chunks share are found.
std::unique_ptr<Pipeline::State> Pipeline::State::make(const std::vector<Maker>& stages,
                                                       const ProcessGroupPtr& group,
                                                       const PipelineOptions& options, bool whole) {
  check_group(group);
  auto state = std::make_unique<State>();
  state->group = group;
  state->options = options;
  const auto rank = static_cast<std::uint32_t>(group->getRank());
  std::string wrong, facts;
  std::exception_ptr failed;
  PipelineSchedule schedule;
  std::map<std::uint32_t, PipelineChunk> chunks;
  try {
    schedule = schedule_of(options, static_cast<std::uint32_t>(group->getSize()));
    state->cuts = cuts_of(options, stages.size(), schedule.chunks());
    facts = facts_of(schedule, state->cuts, stages.size(), options);
    StagesOfChunks made;
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
      const std::uint32_t first = chunk == 0 ? 0 : state->cuts[chunk - 1];
      const std::size_t end = chunk + 1 == schedule.chunks() ? stages.size() : state->cuts[chunk];
      const bool is_own = schedule.rank(chunk, 0) == rank;
      std::vector<PipelineStage> own;
      for (std::size_t stage = first; stage < end && (is_own || whole); ++stage) {
        made.emplace_back(chunk, stages[stage]());
        if (is_own) own.push_back(made.back().second);
      }
      for (const PipelineStage& stage : own) add_new(stage.parameters, state->parameters);
      if (is_own) chunks.emplace(chunk, PipelineChunk(std::move(own), first));
    }
    check_apart(made);
  } catch (const std::exception& error) {
    failed = std::current_exception();
    wrong = message_of(error);
  }
  try {
    agree_on_pipeline(group, wrong, facts);
  } catch (const ConfigError&) {
    if (failed) std::rethrow_exception(failed);
    throw;
  }
  state->numbers = GroupTags::take(group, 1, c10::kCPU);
  state->executor = std::make_unique<PipelineExecutor>(
      std::move(schedule), group, TagSpace::kExchanges + state->numbers.first() * TagSpace::kPerNumber);
  state->executor->chunks() = std::move(chunks);
  return state;
}

Pipeline::Pipeline(const torch::nn::Sequential& modules, const ProcessGroupPtr& group,
                   const PipelineOptions& options)
    : Pipeline(stages_of(modules), group, options) {}
Pipeline::Pipeline(const std::vector<PipelineStage>& stages, const ProcessGroupPtr& group,
                   const PipelineOptions& options)
    : state_(State::make(makers_of(stages), group, options, /*whole=*/true)) {}
Pipeline::Pipeline(const std::vector<Maker>& stages, const ProcessGroupPtr& group,
                   const PipelineOptions& options)
    : state_(State::make(stages, group, options, /*whole=*/false)) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

std::vector<Tensor> Pipeline::parameters() const {
  std::vector<Tensor> all;
  for (const auto& [name, parameter] : state_->parameters) all.push_back(parameter);
  return all;
}
const Named& Pipeline::named_parameters() const { return state_->parameters; }
const PipelineSchedule& Pipeline::schedule() const { return state_->executor->schedule(); }
const PipelineCuts& Pipeline::cuts() const { return state_->cuts; }

Tensor Pipeline::step(const Tensors& batch, const LossOfList& loss) {
  State& state = *state_;
  if (!trains(schedule()))
    throw ConfigError("reef::Pipeline::step: schedule '" + schedule().name +
                      "' has no backward passes: it is for forward() only.");
  const at::AutoGradMode records(true);
  const std::uint32_t count = schedule().micro_batches;
  std::vector<Tensor> losses;
  PipelineExecutor::Run run;
  run.trains = true;
  run.seed = {state.options.seed, state.calls++};
  run.input = cutter(batch, count);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) -> Tensors {
    const Tensor value = loss(outputs, micro_batch);
    if (!value.defined() || value.numel() != 1 || !value.is_floating_point())
      throw ConfigError("reef::Pipeline: a loss is a single floating-point number.");
    losses.resize(count);
    losses[micro_batch] = value.detach();
    return {value.reshape({})};
  };
  run.report = [&]() -> std::string {
    if (losses.empty()) return "";
    const at::NoGradGuard no_grad;
    Tensor sum;
    for (const Tensor& each : losses) sum = sum.defined() ? sum + each.reshape({}) : each.reshape({});
    return text_of_loss(state.options.reduction == Reduction::kMean ? sum / static_cast<std::int64_t>(count)
                                                                    : sum);
  };
  note_call(*state.group, "reef::Pipeline::step");
  GradientsAside gradients(state.parameters);
  const std::vector<std::string> reports = state.executor->run(run);
  gradients.add(state.options.reduction == Reduction::kMean ? count : 1);
  return loss_in(reports[state.rank_of_last()]);
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
  State& state = *state_;
  const std::uint32_t count = schedule().micro_batches;
  std::vector<Tensors> outputs(count);
  PipelineExecutor::Run run;
  run.seed = {state.options.seed, state.calls++};
  run.input = cutter(batch, count);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& made) -> Tensors {
    outputs[micro_batch] = made;
    return {};
  };
  run.report = [] { return std::string(); };
  note_call(*state.group, "reef::Pipeline::forward");
  state.executor->run(run);
  if (state.group->getRank() != static_cast<int>(state.rank_of_last())) return {};
  Tensors whole;
  for (std::size_t i = 0; i < outputs.front().size(); ++i) {
    Tensors rows;
    for (const Tensors& each : outputs) rows.push_back(each.at(i));
    whole.push_back(at::cat(rows));
  }
  return whole;
}

Tensor Pipeline::forward(const Tensor& batch) {
  const Tensors outputs = forward(Tensors{batch});
  return outputs.empty() ? Tensor() : outputs.front();
}

}  // namespace reef
