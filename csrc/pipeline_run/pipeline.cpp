#include "reef/pipeline.h"

#include <algorithm>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/members.h"
#include "pipeline/parcels.h"
#include "pipeline/progress.h"
#include "pipeline/recompute.h"
#include "pipeline_run/options.h"
#include "pipeline_run/pipeline_parts.h"
#include "pipeline_run/planned.h"
#include "pipeline_run/skips.h"
#include "pipeline_run/stages.h"
#include "pipeline_run/tied.h"
#include "reef/error.h"
#include "shard/optimizer_names.h"
#include "shard/together.h"

namespace reef {
namespace {

using at::Tensor;
using Named = std::vector<std::pair<std::string, Tensor>>;

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

/// `whole`: makers are called for the stages of all ranks, which are there anyway, so that weights that
/// chunks share are found.
std::unique_ptr<Pipeline::Parts> Pipeline::Parts::make(const std::vector<Maker>& stages,
                                                       const ProcessGroupPtr& group, PipelineOptions options,
                                                       bool whole) {
  check_group(group);
  auto parts = std::make_unique<Parts>();
  parts->group = group;
  std::string wrong, facts;
  std::exception_ptr failed;
  try {
    check_options(options, static_cast<std::uint32_t>(group->getSize()));
  } catch (const ConfigError& error) {
    wrong = message_of(error);
  }
  agree_on_pipeline(group, wrong, facts_of(options));
  if (options.sample) parts->plan = plan_for_sample(stages, group, options);
  parts->options = options;
  PipelineSchedule schedule;
  std::map<std::uint32_t, std::vector<PipelineStage>> own_stages;  // by chunk
  std::vector<PipelineParameters::OfStage> parameters;
  std::vector<PipelineCuts> cuts;  // of each replica
  MadeStages made;
  std::vector<TiedNames> tied = options.tied;
  try {
    const std::uint32_t ranks = static_cast<std::uint32_t>(group->getSize()) / options.replicas;
    schedule = schedule_of(options, ranks);
    cuts = cuts_of_replicas(options, stages.size(), schedule.chunks());
    parts->cuts = cuts[static_cast<std::uint32_t>(group->getRank()) % options.replicas];
    check_runs(options.recomputed, static_cast<std::uint32_t>(stages.size()));
    facts = facts_of(schedule, cuts, stages.size());
    const std::uint32_t rank = static_cast<std::uint32_t>(group->getRank()) / options.replicas;
    for (std::uint32_t stage = 0; stage < stages.size(); ++stage) {
      const std::uint32_t chunk = chunk_of(stage, parts->cuts);
      const bool is_own = ranks_of_chunk(schedule, chunk).contains(rank);
      if (!is_own && !whole) continue;
      const auto& [number, own] = made.emplace_back(stage, stages[stage]());
      if (!is_own) continue;
      parameters.push_back({number, chunk, own.parameters, own.buffers});
      own_stages[chunk].push_back(own);
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
  const ToldNames told = tell_names(made, group);
  const auto stage_of = stages_of_names(told.parameters);
  const SkipsOfChunks skips = skips_of_chunks(skips_of_names(told), parts->cuts);
  const bool are_alike =
      std::all_of(cuts.begin(), cuts.end(), [&](const PipelineCuts& each) { return each == cuts.front(); });
  const auto count = static_cast<std::uint32_t>(stages.size());
  parts->parameters.emplace(pipeline_segments(schedule, cuts, count),
                            tied_segments(tied, stage_of, schedule, cuts), parameters, group, options.shard,
                            /*in_one_order=*/schedule.rank_of.size() == 1 && are_alike);
  parts->used_by_several_chunks = reef::used_by_several_chunks(tied, made, stage_of, parts->cuts);
  parts->numbers = GroupTags::take(group, 1, c10::kCPU);
  parts->executor = std::make_unique<PipelineExecutor>(
      std::move(schedule), skips.skips, group, options.replicas,
      TagSpace::kExchanges + parts->numbers.first() * TagSpace::kPerNumber);
  const RecomputedRuns whole_runs = whole_chunks(count, parts->cuts);
  const RecomputedRuns& recomputed = options.recompute ? whole_runs : options.recomputed;
  for (auto& [chunk, own] : own_stages) {
    parts->executor->chunks().emplace(
        chunk, PipelineChunk(std::move(own), whole_runs[chunk].first, skips.of_chunk(chunk), recomputed));
  }
  return parts;
}

Pipeline::Pipeline(const torch::nn::Sequential& modules, const ProcessGroupPtr& group,
                   const PipelineOptions& options)
    : Pipeline(stages_of(modules), group, options) {}
Pipeline::Pipeline(const Chain& chain, const ProcessGroupPtr& group, const PipelineOptions& options)
    : Pipeline(stages_of(chain), group, options) {}
Pipeline::Pipeline(const std::vector<PipelineStage>& stages, const ProcessGroupPtr& group,
                   const PipelineOptions& options)
    : parts_(Parts::make(makers_of(stages), group, options, /*whole=*/true)) {}
Pipeline::Pipeline(const std::vector<Maker>& stages, const ProcessGroupPtr& group,
                   const PipelineOptions& options)
    : parts_(Parts::make(stages, group, options, /*whole=*/false)) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

std::vector<Tensor> Pipeline::parameters() const {
  std::vector<Tensor> all;
  for (const auto& [name, parameter] : named_parameters()) all.push_back(parameter);
  return all;
}
const Named& Pipeline::named_parameters() const { return parts_->parameters->stepped(); }
const PipelineSchedule& Pipeline::schedule() const { return parts_->schedule(); }
const PipelineCuts& Pipeline::cuts() const { return parts_->cuts; }
const std::string& Pipeline::plan() const { return parts_->plan; }

double Pipeline::clip_grad_norm_(double max_norm) {
  parts_->note("reef::Pipeline::clip_grad_norm_");
  return parts_->parameters->clip_grad_norm_(max_norm);
}
void Pipeline::clear_gradients() { parts_->parameters->clear_gradients(); }
std::int64_t Pipeline::sent_bytes() const { return parts_->parameters->sent_bytes(); }

StateDict Pipeline::full_state_dict(bool rank0_only) {
  parts_->note("reef::Pipeline::full_state_dict");
  return parts_->parameters->state().full_state_dict(rank0_only);
}
StateDict Pipeline::sharded_state_dict() const { return parts_->parameters->sharded_state_dict(); }
void Pipeline::load_state_dict(const std::vector<StateDict>& given) {
  parts_->note("reef::Pipeline::load_state_dict");
  parts_->parameters->state().load_state_dict(given);
  parts_->uneven.clear();
}

OptimizerState Pipeline::full_optimizer_state(const OptimizerState& own, bool rank0_only) {
  parts_->note("reef::Pipeline::full_optimizer_state");
  return parts_->parameters->state().full_optimizer_state(own, rank0_only);
}
OptimizerState Pipeline::own_optimizer_state(const OptimizerState& own,
                                             const std::vector<OptimizerState>& given,
                                             const std::string& rule) {
  parts_->note("reef::Pipeline::load_optimizer_state");
  return parts_->parameters->state().own_optimizer_state(own, given, rule);
}
OptimizerState Pipeline::full_optimizer_state(const torch::optim::Optimizer& optimizer, bool rank0_only) {
  parts_->note("reef::Pipeline::full_optimizer_state");
  Together together(parts_->group, c10::kCPU);
  OptimizerState own;
  together.here([&] { own = sharded_optimizer_state(optimizer); });
  together.agree_on("the optimizer", rule_of(optimizer));
  return full_optimizer_state(own, rank0_only);
}
OptimizerState Pipeline::sharded_optimizer_state(const torch::optim::Optimizer& optimizer) const {
  return named_state_of(optimizer, stepped_names(*parts_->parameters));
}
void Pipeline::load_optimizer_state(torch::optim::Optimizer& optimizer,
                                    const std::vector<OptimizerState>& given) {
  parts_->note("reef::Pipeline::load_optimizer_state");
  Together together(parts_->group, c10::kCPU);
  OptimizerState groups;
  together.here([&] { groups = named_groups_of(optimizer, stepped_names(*parts_->parameters)); });
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
  parts_->note("a state dict of reef::Pipeline");
  reef::agree_with_ranks(parts_->group, c10::kCPU, failed, rule);
}

}  // namespace reef
