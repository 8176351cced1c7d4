#include "reef/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/group_tags.h"
#include "distributed/members.h"
#include "pipeline_run/executor.h"
#include "pipeline_run/micro_batches.h"
#include "pipeline_run/options.h"
#include "pipeline_run/parameters.h"
#include "pipeline_run/stages.h"
#include "pipeline_run/tied.h"
#include "reef/error.h"
#include "shard/optimizer_names.h"
#include "shard/together.h"

namespace reef {
namespace {

using at::Tensor;
using Tensors = PipelineStage::Tensors;
using Named = std::vector<std::pair<std::string, Tensor>>;

bool trains(const PipelineSchedule& schedule) {
  return std::any_of(
      schedule.actions.front().begin(), schedule.actions.front().end(),
      [](const PipelineAction& action) { return action.kind != PipelineAction::Kind::kForward; });
}

SteppedNames stepped_names(const PipelineParameters& parameters) {
  std::vector<Tensor> tensors;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : parameters.stepped()) {
    tensors.push_back(tensor);
    names.push_back(name);
  }
  return {tensors, names};
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

  const PipelineSchedule& schedule() const { return executor->training().schedule(); }
  std::uint32_t micro_batches() const { return schedule().micro_batches; }
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
  std::vector<std::uint32_t> first_stages;  // of each chunk
  MadeStages made;
  std::vector<TiedNames> tied = options.tied;
  try {
    schedule = schedule_of(options, static_cast<std::uint32_t>(group->getSize()));
    state->cuts = cuts_of(options, stages.size(), schedule.chunks());
    facts = facts_of(schedule, state->cuts, stages.size(), options);
    const std::uint32_t rank = static_cast<std::uint32_t>(group->getRank()) / options.replicas;
    for (std::uint32_t chunk = 0; chunk < schedule.chunks(); ++chunk) {
      const std::uint32_t first = first_stages.emplace_back(chunk == 0 ? 0 : state->cuts[chunk - 1]);
      const std::size_t end = chunk + 1 == schedule.chunks() ? stages.size() : state->cuts[chunk];
      const bool is_own = std::any_of(schedule.rank_of.begin(), schedule.rank_of.end(),
                                      [&](const auto& rank_of) { return rank_of[chunk] == rank; });
      std::vector<PipelineStage> own;
      for (std::size_t stage = first; stage < end && (is_own || whole); ++stage) {
        made.emplace_back(static_cast<std::uint32_t>(stage), stages[stage]());
        if (is_own) own.push_back(made.back().second);
      }
      if (!is_own) continue;
      PipelineParameters::OfChunk& of_chunk = parameters[chunk];
      for (std::size_t i = 0; i < own.size(); ++i)
        of_chunk.push_back({static_cast<std::uint32_t>(first + i), own[i].parameters, own[i].buffers});
      chunks.emplace(chunk, PipelineChunk(std::move(own), first, options.recompute));
    }
    check_tied(made, tied);
    const std::vector<TiedNames> found = find_tied(made);
    if (whole) tied = found;
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
  const auto stage_of = stages_of_names(names_on_all_ranks(names_of(made), group));
  state->parameters.emplace(pipeline_segments(schedule, options.replicas),
                            tied_segments(tied, stage_of, first_stages, schedule, options.replicas),
                            parameters, group, options.shard, schedule.rank_of.size() == 1);
  state->numbers = GroupTags::take(group, 1, c10::kCPU);
  state->executor = std::make_unique<PipelineExecutor>(
      std::move(schedule), group, options.replicas,
      TagSpace::kExchanges + state->numbers.first() * TagSpace::kPerNumber);
  state->executor->chunks() = std::move(chunks);
  return state;
}

PipelineExecutor::Run Pipeline::State::begin(const Tensors& batch) {
  PipelineExecutor::Run run;
  run.course = &executor->serving();
  run.seed = {options.seed, calls++, executor->replica() * micro_batches()};
  run.input = cut_into_micro_batches(batch, micro_batches());
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
const PipelineSchedule& Pipeline::schedule() const { return state_->schedule(); }
const PipelineCuts& Pipeline::cuts() const { return state_->cuts; }

double Pipeline::clip_grad_norm_(double max_norm) {
  note_call(*state_->group, "reef::Pipeline::clip_grad_norm_");
  return state_->parameters->clip_grad_norm_(max_norm);
}
void Pipeline::clear_gradients() { state_->parameters->clear_gradients(); }
std::int64_t Pipeline::sent_bytes() const { return state_->parameters->sent_bytes(); }

StateDict Pipeline::full_state_dict(bool rank0_only) {
  note_call(*state_->group, "reef::Pipeline::full_state_dict");
  return state_->parameters->state().full_state_dict(rank0_only);
}
StateDict Pipeline::sharded_state_dict() const { return state_->parameters->sharded_state_dict(); }
void Pipeline::load_state_dict(const std::vector<StateDict>& given) {
  note_call(*state_->group, "reef::Pipeline::load_state_dict");
  state_->parameters->state().load_state_dict(given);
}

OptimizerState Pipeline::full_optimizer_state(const OptimizerState& own, bool rank0_only) {
  note_call(*state_->group, "reef::Pipeline::full_optimizer_state");
  return state_->parameters->state().full_optimizer_state(own, rank0_only);
}
OptimizerState Pipeline::own_optimizer_state(const OptimizerState& own,
                                             const std::vector<OptimizerState>& given,
                                             const std::string& rule) {
  note_call(*state_->group, "reef::Pipeline::load_optimizer_state");
  return state_->parameters->state().own_optimizer_state(own, given, rule);
}
OptimizerState Pipeline::full_optimizer_state(const torch::optim::Optimizer& optimizer, bool rank0_only) {
  Together together(state_->group, c10::kCPU);
  OptimizerState own;
  together.here([&] { own = sharded_optimizer_state(optimizer); });
  together.agree_on("the optimizer", rule_of(optimizer));
  return full_optimizer_state(own, rank0_only);
}
OptimizerState Pipeline::sharded_optimizer_state(const torch::optim::Optimizer& optimizer) const {
  return named_state_of(optimizer, stepped_names(*state_->parameters));
}
void Pipeline::load_optimizer_state(torch::optim::Optimizer& optimizer,
                                    const std::vector<OptimizerState>& given) {
  Together together(state_->group, c10::kCPU);
  OptimizerState groups;
  together.here([&] { groups = named_groups_of(optimizer, stepped_names(*state_->parameters)); });
  together.agree_on("the optimizer", rule_of(optimizer));
  const OptimizerState state = own_optimizer_state(groups, given, rule_of(optimizer));
  const KeptByOptimizer before(optimizer);
  together.here([&] { reef::load_optimizer_state(optimizer, state); });
  try {
    together.agree();
  } catch (...) {
    before.put_back(optimizer);
    throw;
  }
}

void Pipeline::agree_with_ranks(const std::string& failed, const std::string& rule) const {
  note_call(*state_->group, "a state dict of reef::Pipeline");
  reef::agree_with_ranks(state_->group, c10::kCPU, failed, rule);
}

Tensor Pipeline::step(const Tensors& batch, const LossOfList& loss) {
  State& state = *state_;
  if (!trains(schedule()))
    throw ConfigError("reef::Pipeline::step: schedule '" + schedule().name +
                      "' has no backward passes: it is for forward() only.");
  const at::AutoGradMode records(true);
  std::vector<Tensor> losses(state.micro_batches());
  PipelineExecutor::Run run = state.begin(batch);
  run.course = &state.executor->training();
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
    return text_of_losses(losses, run.seed.first_micro_batch);
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

void Pipeline::generate(const std::vector<Tensors>& starts, std::uint32_t steps, const Next& next) {
  const at::NoGradGuard no_grad;
  State& state = *state_;
  const std::uint32_t lanes = state.micro_batches();
  const PipelineCourse course(repeated(state.executor->serving().schedule(), steps),
                              state.executor->replica(), state.options.replicas, lanes);
  PipelineExecutor::Run run = state.begin({});
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
  note_call(*state.group, "reef::Pipeline::generate");
  state.run(run);
}

Tensor Pipeline::forward(const Tensor& batch) {
  const Tensors outputs = forward(Tensors{batch});
  return outputs.empty() ? Tensor() : outputs.front();
}

}  // namespace reef
