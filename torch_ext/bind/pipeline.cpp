#include "reef/pipeline.h"

#include <ATen/ops/scalar_tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "optimizer_state.h"
#include "pipeline_costs.h"
#include "pipeline_stage.h"
#include "python_function.h"
#include "reduction.h"
#include "shard_options.h"

namespace {

using reef::bind::PythonFunction;
using reef::bind::stage_made_by;

struct BoundPipeline final : torch::CustomClassHolder {
  explicit BoundPipeline(reef::Pipeline given) : pipeline(std::move(given)) {}
  reef::Pipeline pipeline;
};
using Self = c10::intrusive_ptr<BoundPipeline>;

using reef::bind::data_of;
const reef::OptimizerState& state_in(const c10::IValue& held) {
  return held.toCustomClass<reef::bind::OptimizerState>()->state;
}

at::Tensor scalar_of(std::uint32_t number) {
  return at::scalar_tensor(static_cast<std::int64_t>(number), at::kLong);
}

std::vector<std::uint32_t> numbers_of(const char* what, const std::vector<std::int64_t>& given) {
  std::vector<std::uint32_t> numbers;
  for (const std::int64_t number : given) {
    if (number < 0 || number > 1'000'000)
      throw reef::ConfigError(std::string("Pipeline: ") + what + " are from 0 to 1000000, not " +
                              std::to_string(number));
    numbers.push_back(static_cast<std::uint32_t>(number));
  }
  return numbers;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<BoundPipeline>("Pipeline")
      .def("schedule", [](const Self& self) { return self->pipeline.schedule().json(); })
      .def("cuts",
           [](const Self& self) {
             return std::vector<std::int64_t>(self->pipeline.cuts().begin(), self->pipeline.cuts().end());
           })
      .def("plan", [](const Self& self) { return self->pipeline.plan(); })
      .def("micro_batches_of_batch",
           [](const Self& self) { return std::int64_t{self->pipeline.micro_batches_of_batch()}; })
      .def("parameters", [](const Self& self) { return self->pipeline.parameters(); })
      .def("names",
           [](const Self& self) {
             std::vector<std::string> names;
             for (const auto& [name, parameter] : self->pipeline.named_parameters()) names.push_back(name);
             return names;
           })
      .def("clear_gradients", [](const Self& self) { self->pipeline.clear_gradients(); })
      .def("sent_bytes", [](const Self& self) { return self->pipeline.sent_bytes(); })
      .def("agree", [](const Self& self, const std::string& failed,
                       const std::string& rule) { self->pipeline.agree_with_ranks(failed, rule); })
      .def("full_state_dict",
           [](const Self& self, bool rank0_only) { return self->pipeline.full_state_dict(rank0_only); })
      .def("sharded_state_dict", [](const Self& self) { return self->pipeline.sharded_state_dict(); })
      .def("load_state_dict",
           [](const Self& self, const std::vector<reef::StateDict>& given) {
             self->pipeline.load_state_dict(given);
           })
      // Optimizers' states are data here: their class may not be known yet.
      .def("full_optimizer_state",
           [](const Self& self, const c10::IValue& own, bool rank0_only) {
             return data_of(self->pipeline.full_optimizer_state(state_in(own), rank0_only));
           })
      .def("own_optimizer_state",
           [](const Self& self, const c10::IValue& own, const std::vector<c10::IValue>& given,
              const std::string& rule) {
             std::vector<reef::OptimizerState> states;
             for (const c10::IValue& one : given) states.push_back(state_in(one));
             return data_of(self->pipeline.own_optimizer_state(state_in(own), states, rule));
           })
      .def("clip_grad_norm_",
           [](const Self& self, double max_norm) { return self->pipeline.clip_grad_norm_(max_norm); });
  // Operators, through which what Python's stages raise arrives; not so through methods.
  m.def(
      "make_pipeline(int[] makers, bool whole, __torch__.torch.classes.c10d.ProcessGroup group, int "
      "micro_batches, str schedule, int chunks_per_rank, int[] hops, int[] ranks_per_chunk, str actions, "
      "int[] cuts, int replicas, "
      "int[][] replica_cuts, int staleness, "
      "Any shard, bool recompute, int[] recomputed, str[][] tied, str reduction, int seed, Tensor[] sample, "
      "int rank_bytes, "
      "float state_bytes_per_byte, bool may_replicate, int? sample_loss, int synchronous_batches, float "
      "correction_decay) -> "
      "__torch__.torch.classes.reef.Pipeline",
      [](const std::vector<std::int64_t>& makers, bool whole, const reef::ProcessGroupPtr& group,
         std::int64_t micro_batches, const std::string& schedule, std::int64_t chunks_per_rank,
         const std::vector<std::int64_t>& hops, const std::vector<std::int64_t>& ranks_per_chunk,
         const std::string& actions, const std::vector<std::int64_t>& cuts, std::int64_t replicas,
         const std::vector<std::vector<std::int64_t>>& replica_cuts, std::int64_t staleness,
         const c10::IValue& shard, bool recompute, const std::vector<std::int64_t>& recomputed,
         const std::vector<std::vector<std::string>>& tied, const std::string& reduction, std::int64_t seed,
         const std::vector<at::Tensor>& sample, std::int64_t rank_bytes, double state_bytes_per_byte,
         bool may_replicate, std::optional<std::int64_t> sample_loss, std::int64_t synchronous_batches,
         double correction_decay) {
        reef::PipelineOptions options;
        options.micro_batches = numbers_of("micro_batches", {micro_batches}).front();
        options.schedule = schedule;
        options.chunks_per_rank = numbers_of("chunks_per_rank", {chunks_per_rank}).front();
        options.hops = numbers_of("hops", hops);
        options.ranks_per_chunk = numbers_of("ranks_per_chunk", ranks_per_chunk);
        if (!actions.empty()) options.actions = reef::pipeline_schedule_from_json(actions);
        options.cuts = numbers_of("cuts", cuts);
        options.replicas = numbers_of("replicas", {replicas}).front();
        for (const std::vector<std::int64_t>& of_one : replica_cuts)
          options.replica_cuts.push_back(numbers_of("cuts", of_one));
        options.staleness = numbers_of("staleness", {staleness}).front();
        options.shard = reef::bind::shard_options_of(shard);
        options.recompute = recompute;
        options.recomputed = reef::bind::runs_of(recomputed);
        options.tied = tied;
        options.reduction = reef::bind::reduction_of(reduction);
        options.seed = static_cast<std::uint64_t>(seed);
        options.synchronous_batches = numbers_of("synchronous_batches", {synchronous_batches}).front();
        options.correction_decay = correction_decay;
        if (!sample.empty()) {
          options.sample =
              reef::PipelineSample{sample, static_cast<std::uint64_t>(rank_bytes), state_bytes_per_byte,
                                   may_replicate, reef::bind::loss_of_outputs(sample_loss)};
        }
        std::vector<reef::PipelineStage> stages;
        std::vector<reef::Pipeline::Maker> later;
        for (const std::int64_t maker : makers) {
          const PythonFunction call(maker);
          if (whole) {
            stages.push_back(stage_made_by(call));
          } else {
            later.emplace_back([call] { return stage_made_by(call); });
          }
        }
        return c10::make_intrusive<BoundPipeline>(whole ? reef::Pipeline(stages, group, options)
                                                        : reef::Pipeline(later, group, options));
      });
  m.def("pipeline_step(__torch__.torch.classes.reef.Pipeline pipeline, Tensor[] batch, int loss) -> Tensor",
        [](const Self& self, const std::vector<at::Tensor>& batch, std::int64_t loss) {
          return self->pipeline.step(batch,
                                     [call = PythonFunction(loss)](const std::vector<at::Tensor>& outputs,
                                                                   std::uint32_t micro_batch) {
                                       std::vector<at::Tensor> given = {scalar_of(micro_batch)};
                                       given.insert(given.end(), outputs.begin(), outputs.end());
                                       return call(given).at(0);
                                     });
        });
  m.def(
      "pipeline_train(__torch__.torch.classes.reef.Pipeline pipeline, int batches, int batch, int loss, int "
      "update) -> Tensor",
      [](const Self& self, std::int64_t batches, std::int64_t batch, std::int64_t loss, std::int64_t update) {
        return self->pipeline.train(
            numbers_of("batches", {batches}).front(),
            [call = PythonFunction(batch)](std::uint32_t number) { return call({scalar_of(number)}); },
            [call = PythonFunction(loss)](const std::vector<at::Tensor>& outputs, std::uint32_t number,
                                          std::uint32_t micro_batch) {
              std::vector<at::Tensor> given = {scalar_of(number), scalar_of(micro_batch)};
              given.insert(given.end(), outputs.begin(), outputs.end());
              return call(given).at(0);
            },
            [call = PythonFunction(update)] { call({}); });
      });
  m.def("pipeline_train_schedule(__torch__.torch.classes.reef.Pipeline pipeline, int batches) -> str",
        [](const Self& self, std::int64_t batches) {
          return self->pipeline.train_schedule(numbers_of("batches", {batches}).front()).json();
        });
  m.def(
      "pipeline_generate(__torch__.torch.classes.reef.Pipeline pipeline, Tensor[][] starts, int steps, int "
      "next) "
      "-> ()",
      [](const Self& self, const std::vector<std::vector<at::Tensor>>& starts, std::int64_t steps,
         std::int64_t next) {
        self->pipeline.generate(starts, numbers_of("steps", {steps}).front(),
                                [call = PythonFunction(next)](const std::vector<at::Tensor>& outputs,
                                                              std::uint32_t lane, std::uint32_t step) {
                                  std::vector<at::Tensor> given = {scalar_of(lane), scalar_of(step)};
                                  given.insert(given.end(), outputs.begin(), outputs.end());
                                  return call(given);
                                });
      });
  m.def("pipeline_micro_batch() -> int?", []() -> std::optional<std::int64_t> {
    const std::optional<std::uint32_t> number = reef::pipeline_micro_batch();
    return number ? std::optional<std::int64_t>(*number) : std::nullopt;
  });
  m.def("pipeline_forward(__torch__.torch.classes.reef.Pipeline pipeline, Tensor[] batch) -> Tensor[]",
        [](const Self& self, const std::vector<at::Tensor>& batch) { return self->pipeline.forward(batch); });
}
