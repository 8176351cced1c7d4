#include "reef/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "distributed/group_tags.h"
#include "distributed/members.h"
#include "pipeline_run/executor.h"
#include "pipeline_run/micro_batches.h"
#include "pipeline_run/options.h"
#include "pipeline_run/parameters.h"
#include "pipeline_run/planned.h"
#include "pipeline_run/stages.h"
#include "pipeline_run/tied.h"
#include "pipeline_run/training.h"
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

/// What a training run begins backward at, which is the loss. Keeps it.
Tensors ends_of(const Tensor& loss, Tensor& kept) {
  if (!loss.defined() || loss.numel() != 1 || !loss.is_floating_point())
    throw ConfigError("reef::Pipeline: a loss is a single floating-point number.");
  kept = loss.detach();
  return {loss.reshape({})};
}

}  // namespace

struct Pipeline::State {
  static std::unique_ptr<State> make(const std::vector<Maker>& stages, const ProcessGroupPtr& group,
                                     PipelineOptions options, bool whole);

  ProcessGroupPtr group;
  PipelineOptions options;
  PipelineCuts cuts;
  std::string plan;  ///< for the sample
  GroupTags numbers;
  std::unique_ptr<PipelineExecutor> executor;
  std::optional<PipelineParameters> parameters;
  std::uint64_t calls = 0;
  std::uint64_t trained_batches = 0;  ///< by train()
  bool runs = false;                  ///< a call is under way
  std::string uneven;                 ///< how many updates chunks have had, if a call has failed between them

  const PipelineSchedule& schedule() const { return executor->training().schedule(); }
  std::uint32_t micro_batches() const { return schedule().micro_batches; }
  /// Of gradients and losses, of a batch of so many micro-batches.
  std::int64_t divisor(std::uint32_t count) const {
    return options.reduction == Reduction::kMean ? std::int64_t{options.replicas} * count : 1;
  }
  /// Throws ConfigError if it is called by what a run calls, when other ranks are elsewhere.
  void note(const std::string& call) const;
  /// Notes a call, which uses the random numbers of so many.
  PipelineExecutor::Run begin(const char* call, const Tensors& batch, std::uint32_t count = 1);
  std::vector<std::string> run(const PipelineExecutor::Run& run);
};

/// `whole`: makers are called for the stages of all ranks, which are there anyway, so that weights that
/// chunks share are found.
std::unique_ptr<Pipeline::State> Pipeline::State::make(const std::vector<Maker>& stages,
                                                       const ProcessGroupPtr& group, PipelineOptions options,
                                                       bool whole) {
  check_group(group);
  auto state = std::make_unique<State>();
  state->group = group;
  std::string wrong, facts;
  std::exception_ptr failed;
  try {
    check_options(options, static_cast<std::uint32_t>(group->getSize()));
  } catch (const ConfigError& error) {
    wrong = message_of(error);
  }
  agree_on_pipeline(group, wrong, facts_of(options));
  if (options.sample) state->plan = plan_for_sample(stages, group, options);
  state->options = options;
  PipelineSchedule schedule;
  std::map<std::uint32_t, PipelineChunk> chunks;
  std::map<std::uint32_t, PipelineParameters::OfChunk> parameters;
  std::vector<std::uint32_t> first_stages;  // of each chunk
  MadeStages made;
  std::vector<TiedNames> tied = options.tied;
  try {
    const std::uint32_t ranks = static_cast<std::uint32_t>(group->getSize()) / options.replicas;
    schedule = schedule_of(options, ranks);
    state->cuts = cuts_of(options, stages.size(), schedule.chunks());
    facts = facts_of(schedule, state->cuts, stages.size());
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

void Pipeline::State::note(const std::string& call) const {
  if (runs)
    throw ConfigError(call +
                      " was called by a stage, a loss or an update of this pipeline, while the other "
                      "ranks are elsewhere: call it when the pipeline's call has returned.");
  note_call(*group, call);
}

PipelineExecutor::Run Pipeline::State::begin(const char* call, const Tensors& batch, std::uint32_t count) {
  note(call);
  if (!uneven.empty())
    throw ConfigError(std::string(call) + ": a call of train() has failed when " + uneven +
                      ", so the chunks are not of one model: load a state (load_state_dict).");
  PipelineExecutor::Run run;
  run.course = &executor->serving();
  run.seed = {options.seed, calls, executor->replica() * micro_batches(), micro_batches()};
  calls += count;
  run.input = cut_into_micro_batches(batch, micro_batches());
  run.failed = [this] { parameters->tell_failed(); };
  run.meanwhile = parameters->while_waiting();
  return run;
}

std::vector<std::string> Pipeline::State::run(const PipelineExecutor::Run& run) {
  parameters->use();
  runs = true;
  const auto ended = [this](void*) { runs = false; };
  const std::unique_ptr<void, decltype(ended)> until_it_ends(this, ended);
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
const std::string& Pipeline::plan() const { return state_->plan; }

double Pipeline::clip_grad_norm_(double max_norm) {
  state_->note("reef::Pipeline::clip_grad_norm_");
  return state_->parameters->clip_grad_norm_(max_norm);
}
void Pipeline::clear_gradients() { state_->parameters->clear_gradients(); }
std::int64_t Pipeline::sent_bytes() const { return state_->parameters->sent_bytes(); }

StateDict Pipeline::full_state_dict(bool rank0_only) {
  state_->note("reef::Pipeline::full_state_dict");
  return state_->parameters->state().full_state_dict(rank0_only);
}
StateDict Pipeline::sharded_state_dict() const { return state_->parameters->sharded_state_dict(); }
void Pipeline::load_state_dict(const std::vector<StateDict>& given) {
  state_->note("reef::Pipeline::load_state_dict");
  state_->parameters->state().load_state_dict(given);
  state_->uneven.clear();
}

OptimizerState Pipeline::full_optimizer_state(const OptimizerState& own, bool rank0_only) {
  state_->note("reef::Pipeline::full_optimizer_state");
  return state_->parameters->state().full_optimizer_state(own, rank0_only);
}
OptimizerState Pipeline::own_optimizer_state(const OptimizerState& own,
                                             const std::vector<OptimizerState>& given,
                                             const std::string& rule) {
  state_->note("reef::Pipeline::load_optimizer_state");
  return state_->parameters->state().own_optimizer_state(own, given, rule);
}
OptimizerState Pipeline::full_optimizer_state(const torch::optim::Optimizer& optimizer, bool rank0_only) {
  state_->note("reef::Pipeline::full_optimizer_state");
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
  state_->note("reef::Pipeline::load_optimizer_state");
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
  state_->note("a state dict of reef::Pipeline");
  reef::agree_with_ranks(state_->group, c10::kCPU, failed, rule);
}

Tensor Pipeline::step(const Tensors& batch, const LossOfList& loss) {
  State& state = *state_;
  if (schedule().versions.kind != PipelineVersionRule::Kind::kFlush)
    throw ConfigError("reef::Pipeline::step: schedule '" + schedule().name +
                      "' is asynchronous and updates weights by itself: use train().");
  if (!trains(schedule()))
    throw ConfigError("reef::Pipeline::step: schedule '" + schedule().name +
                      "' has no backward passes: it is for forward() only.");
  const at::AutoGradMode records(true);
  const std::uint32_t count = state.micro_batches(), replicas = state.options.replicas;
  std::vector<Tensor> losses(count);
  PipelineExecutor::Run run = state.begin("reef::Pipeline::step", batch);
  run.course = &state.executor->training();
  run.trains = true;
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) {
    return ends_of(loss(outputs, micro_batch), losses[micro_batch]);
  };
  run.report = [&] {
    state.parameters->check();
    return text_of_losses(losses, count, state.executor->replica(), replicas);
  };
  PipelineParameters::OfCall gradients(*state.parameters);
  const std::vector<Tensor> sums = sums_of_losses(state.run(run), count * replicas);
  const std::int64_t divisor = state.divisor(count);
  gradients.add(divisor);
  return divisor == 1 ? sums.front() : sums.front() / divisor;
}

Tensor Pipeline::train(std::uint32_t batches, const Batches& batch, const LossOfBatch& loss,
                       const std::function<void()>& update) {
  const at::AutoGradMode records(true);
  State& state = *state_;
  const std::uint32_t count = micro_batches_of_batch();
  PipelineExecutor::Run run = state.begin("reef::Pipeline::train", {}, batches);
  run.seed.micro_batches_per_call = count;
  run.seed.first_micro_batch = state.executor->replica() * count;
  std::optional<PipelineCourse> course;
  std::optional<PipelineTraining> training;
  Together together(state.group, c10::kCPU);
  together.here([&] {
    if (!state.parameters->steps_chunks())
      throw ConfigError(
          "reef::Pipeline::train is for chunks whose parameters are not sharded and not shared by "
          "other chunks: use step().");
    course.emplace(train_schedule(batches), state.executor->replica(), state.options.replicas);
    const std::uint32_t divisor = state.options.reduction == Reduction::kMean ? state.options.replicas : 0;
    training.emplace(
        state.executor->chunks(), course->schedule(),
        PipelineTraining::Update{[&state](std::uint32_t chunk) { state.parameters->reduce(chunk); }, divisor,
                                 update, state.options.correction_decay});
  });
  together.agree_on("the number of batches", std::to_string(batches));
  std::vector<Tensor> losses(course->schedule().micro_batches);
  run.course = &*course;
  run.trains = true;
  run.input = cut_each_batch(batch, count);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& outputs) {
    return ends_of(loss(outputs, micro_batch / count, micro_batch % count), losses[micro_batch]);
  };
  run.update = [&](std::uint32_t chunk, std::uint32_t micro_batch) { training->update(chunk, micro_batch); };
  run.leave_update = [&](std::uint32_t chunk, const std::string& why) {
    state.parameters->abandon(chunk, why);
  };
  run.report = [&] {
    return text_of_losses(losses, count, state.executor->replica(), state.options.replicas);
  };
  const PipelineParameters::OfCall gradients(*state.parameters);
  std::vector<std::string> reports;
  try {
    reports = state.run(run);
  } catch (const RankFailed&) {
    throw;
  } catch (const RanksOutOfStep&) {
    throw;
  } catch (...) {
    state.uneven = uneven_updates(gather_texts(training->updates(), state.group, c10::kCPU));
    throw;
  }
  state.trained_batches += batches;
  const Tensor sums = at::stack(sums_of_losses(reports, count * state.options.replicas));
  return sums / state.divisor(count);
}

std::uint32_t Pipeline::micro_batches_of_batch() const { return reef::micro_batches_of_batch(schedule()); }
PipelineSchedule Pipeline::train_schedule(std::uint32_t batches) const {
  return training_schedule(state_->options, schedule(), batches, state_->trained_batches);
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
  PipelineExecutor::Run run = state.begin("reef::Pipeline::forward", batch);
  run.finish = [&](std::uint32_t micro_batch, const Tensors& made) -> Tensors {
    outputs[micro_batch] = made;
    return {};
  };
  run.report = [] { return std::string(); };
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
  PipelineExecutor::Run run = state.begin("reef::Pipeline::generate", {}, steps);
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
  state.run(run);
}

Tensor Pipeline::forward(const Tensor& batch) {
  const Tensors outputs = forward(Tensors{batch});
  return outputs.empty() ? Tensor() : outputs.front();
}

}  // namespace reef
