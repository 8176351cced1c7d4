// What tests of Pipeline::train() share: a chain of stages, and one process that follows a table of versions.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/pipeline_versions.h"

namespace reef::train_tests {

using namespace pipeline_tests;
using Variables = torch::autograd::variable_list;
using torch::autograd::AutogradContext;

constexpr std::int64_t kWidth = 5;
constexpr std::uint32_t kStages = 8, kBatches = 5;

/// Multiplies by one matrix forward, and by another backward.
struct TwoVersions : torch::autograd::Function<TwoVersions> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& of_forward,
                        const Tensor& of_backward) {
    context->save_for_backward({x, of_backward});
    return x.mm(of_forward);
  }
  static Variables backward(AutogradContext* context, const Variables& gradients) {
    const Variables saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0]), Tensor()};
  }
};

/// Multiplies, and keeps a view of the matrix that autograd does not know of.
struct KeepsView : torch::autograd::Function<KeepsView> {
  static Tensor forward(AutogradContext* context, const Tensor& x, const Tensor& weight) {
    context->save_for_backward({x});
    context->saved_data["view"] = weight.t();
    return x.mm(weight);
  }
  static Variables backward(AutogradContext* context, const Variables& gradients) {
    return {gradients[0].mm(context->saved_data["view"].toTensor()),
            context->get_saved_variables()[0].t().mm(gradients[0])};
  }
};

inline Tensor initial(std::uint32_t stage) {
  torch::manual_seed(stage + 1);
  return torch::randn({kWidth, kWidth}) / 2;
}
/// `replica`: which has it.
inline Tensor batch_of(std::uint32_t number, std::uint32_t micro_batches, std::uint32_t replica = 0) {
  torch::manual_seed(1000 + number + 100 * replica);
  return torch::randn({2 * micro_batches + 1, kWidth});
}
inline Tensor loss_in(std::uint32_t batch, std::uint32_t micro_batch, const Tensor& output) {
  return (output - 0.1 * (1 + batch + micro_batch)).square().mean();
}

enum class Rule : std::uint8_t { kSgd, kAdamW };
inline std::unique_ptr<torch::optim::Optimizer> optimizer_of(Rule rule,
                                                             const std::vector<Tensor>& parameters) {
  const std::vector<torch::optim::OptimizerParamGroup> groups = {parameters};
  if (rule == Rule::kSgd)
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.05).momentum(0.9));
  return std::make_unique<torch::optim::AdamW>(groups, torch::optim::AdamWOptions(0.02));
}

struct Made {
  std::vector<PipelineStage> stages;
  std::vector<Tensor> weights;
};
/// `before`: is called before each forward pass of a stage, with its weight.
inline Made make_stages(const std::function<void(std::uint32_t, const Tensor&)>& before = {}) {
  Made made;
  for (std::uint32_t i = 0; i < kStages; ++i) {
    const Tensor weight = made.weights.emplace_back(initial(i).set_requires_grad(true));
    PipelineStage& stage = made.stages.emplace_back();
    stage.parameters = {{std::to_string(i) + ".weight", weight}};
    stage.run = [weight, i, before](const Tensors& given) -> Tensors {
      if (before) before(i, weight);
      return {(i % 2 == 0 ? given[0].mm(weight) : KeepsView::apply(given[0], weight)).tanh()};
    };
  }
  return made;
}

struct Row {
  std::string schedule;
  std::uint32_t micro_batches = 1;  ///< of a batch
  std::uint32_t chunks_per_rank = 0;
  std::vector<std::uint32_t> hops = {};
  std::uint32_t replicas = 1;
  std::uint32_t synchronous_batches = 0;
  double correction_decay = 0;
  std::vector<PipelineCuts> replica_cuts = {};
};
inline std::string text_of(const Row& row) {
  return std::to_string(row.replicas) + " x " + row.schedule + ", " + std::to_string(row.micro_batches) +
         " micro-batches a batch, hops " + (row.hops.empty() ? "1" : std::to_string(row.hops.front())) +
         ", synchronous " + std::to_string(row.synchronous_batches) + ", decay " +
         std::to_string(row.correction_decay) + (row.replica_cuts.empty() ? "" : ", cut differently");
}
inline PipelineOptions options_of(const Row& row) {
  return {.micro_batches = row.micro_batches,
          .schedule = row.schedule,
          .chunks_per_rank = row.chunks_per_rank,
          .hops = row.hops,
          .replicas = row.replicas,
          .replica_cuts = row.replica_cuts,
          .synchronous_batches = row.synchronous_batches,
          .correction_decay = row.correction_decay};
}

/// What one process makes of all weights that follows the table; chunks end before the `cuts`, of each
/// replica.
struct Replay {
  std::vector<Tensor> weights;
  std::vector<Tensor> losses;
};
inline Replay replay(const PipelineSchedule& schedule, const std::vector<PipelineCuts>& cuts,
                     std::uint32_t per_batch, Rule rule, double decay = 0) {
  const auto replicas = static_cast<std::uint32_t>(cuts.size());
  const PipelineVersions versions = pipeline_versions(schedule);
  std::uint32_t per_update = per_batch;  // HetPipe's updates are of single micro-batches
  if (schedule.versions.kind == PipelineVersionRule::Kind::kWave) per_update = 1;
  Replay made;
  std::vector<std::vector<Tensor>> history(kStages);
  for (std::uint32_t i = 0; i < kStages; ++i) {
    made.weights.push_back(initial(i).set_requires_grad(true));
    history[i].push_back(made.weights[i].detach().clone());
  }
  const auto optimizer = optimizer_of(rule, made.weights);
  const std::vector<double> delays =
      decay > 0 ? pipeline_delays(schedule) : std::vector<double>(schedule.chunks());
  // d of PipelineOptions::correction_decay, of each version.
  std::vector<std::vector<Tensor>> d(kStages, {torch::zeros({kWidth, kWidth})});
  std::vector<std::vector<Tensor>> parts(replicas), sums(replicas, std::vector<Tensor>(kStages));
  std::vector<std::vector<Tensor>> losses(replicas);  // of a batch
  for (std::uint32_t m = 0; m < schedule.micro_batches; ++m) {
    const std::uint32_t batch = m / per_batch;
    for (std::uint32_t replica = 0; replica < replicas; ++replica) {
      if (m % per_batch == 0) parts[replica] = batch_of(batch, per_batch, replica).tensor_split(per_batch);
      std::vector<Tensor> used;
      Tensor x = parts[replica][m % per_batch];
      for (std::uint32_t i = 0; i < kStages; ++i) {
        const std::uint32_t chunk = chunk_of(i, cuts[replica]);
        const PipelineVersion& version = versions.of[chunk][m];
        used.push_back(history[i][version.forward].clone().set_requires_grad(true));
        Tensor of_backward = history[i][version.backward];
        if (delays[chunk] > 0) of_backward = torch::sub(of_backward, d[i][version.backward], delays[chunk]);
        x = TwoVersions::apply(x, used.back(), of_backward).tanh();
      }
      losses[replica].push_back(loss_in(batch, m % per_batch, x));
      losses[replica].back().backward();
      for (std::uint32_t i = 0; i < kStages; ++i) {
        Tensor& sum = sums[replica][i];
        sum = sum.defined() ? sum + used[i].grad() : used[i].grad();
      }
    }
    if ((m + 1) % per_batch == 0) {
      Tensor sum = torch::zeros({});
      for (std::vector<Tensor>& of_replica : losses) {
        for (const Tensor& loss : std::exchange(of_replica, {})) sum = sum + loss.detach();
      }
      made.losses.push_back(sum / std::int64_t{per_batch * replicas});
    }
    if ((m + 1) % per_update != 0) continue;
    for (std::uint32_t i = 0; i < kStages; ++i) {
      Tensor all;
      for (std::vector<Tensor>& of_replica : sums) {
        const Tensor sum = std::exchange(of_replica[i], {});
        all = all.defined() ? all + sum : sum;
      }
      made.weights[i].mutable_grad() = all / std::int64_t{per_update * replicas};
    }
    optimizer->step();
    for (std::uint32_t i = 0; i < kStages; ++i) {
      const std::uint32_t chunk = chunk_of(i, cuts[0]);
      const Tensor before = history[i].back();
      history[i].push_back(made.weights[i].detach().clone());
      const double follows = delays[chunk] > 0 ? std::pow(decay, 1 / delays[chunk]) : 0;
      d[i].push_back(d[i].back().mul(follows).add(history[i].back() - before, 1 - follows));
    }
  }
  return made;
}

inline Tensor train(Pipeline& pipeline, std::uint32_t batches, const std::function<void()>& update,
                    std::uint32_t replica = 0) {
  return pipeline.train(
      batches,
      [&](std::uint32_t batch) {
        return Tensors{batch_of(batch, pipeline.micro_batches_of_batch(), replica)};
      },
      [](const Tensors& outputs, std::uint32_t batch, std::uint32_t micro_batch) {
        return loss_in(batch, micro_batch, outputs[0]);
      },
      update);
}

}  // namespace reef::train_tests
