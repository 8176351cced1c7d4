#include "reef/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <ios>
#include <map>
#include <optional>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "distributed/group_tags.h"
#include "distributed/members.h"
#include "pipeline_run/executor.h"
#include "pipeline_run/options.h"
#include "pipeline_run/parameters.h"
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
  for (const auto& each : module.ptr()->named_buffers())
    stage.buffers.emplace_back(name + "." + each.key(), each.value());
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

bool trains(const PipelineSchedule& schedule) {
  return std::any_of(
      schedule.actions.front().begin(), schedule.actions.front().end(),
      [](const PipelineAction& action) { return action.kind != PipelineAction::Kind::kForward; });
}

/// The losses of a rank's micro-batches as text, for the other ranks.
std::string text_of(const std::vector<Tensor>& losses, std::uint32_t first_number) {
  std::ostringstream text;
  text << std::hexfloat;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (!losses[i].defined()) continue;
    text << first_number + i << " " << static_cast<int>(losses[i].scalar_type()) << " "
         << losses[i].item<double>() << "\n";
  }
  return text.str();
}

/// Adds up the losses of all ranks in the order of micro-batches.
Tensor sum_of_losses(const std::vector<std::string>& texts) {
  std::map<std::size_t, Tensor> losses;
  for (const std::string& text : texts) {
    for (const std::string& line : lines_of(text)) {
      char* rest = nullptr;
      const std::size_t number = std::strtoull(line.c_str(), &rest, 10);
      const long dtype = std::strtol(rest, &rest, 10);
      losses[number] = at::full({}, std::strtod(rest, nullptr), static_cast<at::ScalarType>(dtype));
    }
  }
  Tensor sum;
  for (const auto& [number, loss] : losses) sum = sum.defined() ? sum + loss : loss;
  return sum;
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
  std::optional<PipelineParameters> parameters;
  std::uint64_t calls = 0;

  std::uint32_t micro_batches() const { return executor->schedule().micro_batches; }
  PipelineExecutor::Run begin(const Tensors& batch);
  std::vector<std::string> run(const PipelineExecutor::Run& run);
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
  std::string wrong, facts;
  std::exception_ptr failed;
  PipelineSchedule schedule;
  std::map<std::uint32_t, PipelineChunk> chunks;
  std::map<std::uint32_t, PipelineParameters::OfChunk> parameters;
  try {
    schedule = schedule_of(options, static_cast<std::uint32_t>(group->getSize()));
    state->cuts = cuts_of(options, stages.size(), schedule.chunks());
    facts = facts_of(schedule, state->cuts, stages.size(), options);
    const std::uint32_t rank = static_cast<std::uint32_t>(group->getRank()) / options.replicas;
    StagesOfChunks made;
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
      const std::uint32_t first = chunk == 0 ? 0 : state->cuts[chunk - 1];
      const std::size_t end = chunk + 1 == schedule.chunks() ? stages.size() : state->cuts[chunk];
      const bool is_own = std::any_of(schedule.rank_of.begin(), schedule.rank_of.end(),
                                      [&](const auto& rank_of) { return rank_of[chunk] == rank; });
      std::vector<PipelineStage> own;
      for (std::size_t stage = first; stage < end && (is_own || whole); ++stage) {
        made.emplace_back(chunk, stages[stage]());
        if (is_own) own.push_back(made.back().second);
      }
      if (!is_own) continue;
      PipelineParameters::OfChunk& of_chunk = parameters[chunk];
      for (const PipelineStage& stage : own) {
        of_chunk.parameters.insert(of_chunk.parameters.end(), stage.parameters.begin(),
                                   stage.parameters.end());
        of_chunk.buffers.insert(of_chunk.buffers.end(), stage.buffers.begin(), stage.buffers.end());
      }
      chunks.emplace(chunk, PipelineChunk(std::move(own), first));
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
  state->parameters.emplace(pipeline_segments(schedule, options.replicas), parameters, group, options.shard,
                            schedule.rank_of.size() == 1);
  state->numbers = GroupTags::take(group, 1, c10::kCPU);
  state->executor = std::make_unique<PipelineExecutor>(
      std::move(schedule), group, options.replicas,
      TagSpace::kExchanges + state->numbers.first() * TagSpace::kPerNumber);
  state->executor->chunks() = std::move(chunks);
  return state;
}

PipelineExecutor::Run Pipeline::State::begin(const Tensors& batch) {
  PipelineExecutor::Run run;
  run.seed = {options.seed, calls++, executor->replica() * micro_batches()};
  run.input = cutter(batch, micro_batches());
  run.failed = [this] { parameters->tell_failed(); };
  run.meanwhile = parameters->while_waiting();
  return run;
}

std::vector<std::string> Pipeline::State::run(const PipelineExecutor::Run& run) {
  parameters->use();
  try {
    return executor->run(run);
  } catch (const RankFailed&) {
    throw;
  } catch (const RanksOutOfStep&) {
    throw;
  } catch (...) {
    parameters->leave_out();
    throw;
  }
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
  for (const auto& [name, parameter] : named_parameters()) all.push_back(parameter);
  return all;
}
const Named& Pipeline::named_parameters() const { return state_->parameters->stepped(); }
const PipelineSchedule& Pipeline::schedule() const { return state_->executor->schedule(); }
const PipelineCuts& Pipeline::cuts() const { return state_->cuts; }

double Pipeline::clip_grad_norm_(double max_norm) {
  note_call(*state_->group, "reef::Pipeline::clip_grad_norm_");
  return state_->parameters->clip_grad_norm_(max_norm);
}
void Pipeline::clear_gradients() { state_->parameters->clear_gradients(); }

Tensor Pipeline::step(const Tensors& batch, const LossOfList& loss) {
  State& state = *state_;
  if (!trains(schedule()))
    throw ConfigError("reef::Pipeline::step: schedule '" + schedule().name +
                      "' has no backward passes: it is for forward() only.");
  const at::AutoGradMode records(true);
  std::vector<Tensor> losses(state.micro_batches());
  PipelineExecutor::Run run = state.begin(batch);
  run.trains = true;
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) -> Tensors {
    const Tensor value = loss(outputs, micro_batch);
    if (!value.defined() || value.numel() != 1 || !value.is_floating_point())
      throw ConfigError("reef::Pipeline: a loss is a single floating-point number.");
    losses[micro_batch] = value.detach();
    return {value.reshape({})};
  };
  run.report = [&] {
    state.parameters->check();
    return text_of(losses, run.seed.first_micro_batch);
  };
  note_call(*state.group, "reef::Pipeline::step");
  PipelineParameters::OfCall gradients(*state.parameters);
  const Tensor sum = sum_of_losses(state.run(run));
  const std::int64_t divisor = state.options.reduction == Reduction::kMean
                                   ? std::int64_t{state.options.replicas} * state.micro_batches()
                                   : 1;
  gradients.add(divisor);
  return divisor == 1 ? sum : sum / divisor;
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
  std::vector<Tensors> outputs(state.micro_batches());
  PipelineExecutor::Run run = state.begin(batch);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& made) -> Tensors {
    outputs[micro_batch] = made;
    return {};
  };
  run.report = [] { return std::string(); };
  note_call(*state.group, "reef::Pipeline::forward");
  state.run(run);
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
