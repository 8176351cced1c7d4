#include "reef/measure_pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "pipeline_run/chunk.h"
#include "pipeline_run/micro_batches.h"
#include "pipeline_run/skips.h"
#include "pipeline_run/stages.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "reef/measure_link.h"
#include "reef/pipeline_generator.h"
#include "reef/subgroup.h"
#include "shard/together.h"
#include "tensor_layout.h"

namespace reef {
namespace {

using at::Tensor;
using Tensors = PipelineStage::Tensors;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Seconds since the last call, when what was given to the device has been done.
class Watch {
 public:
  explicit Watch(c10::Device device) : device_(device) {}
  double lap() {
    if (!device_.is_cpu()) at::ones({}, device_).item<float>();
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
  }

 private:
  c10::Device device_;
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

/// Gives a stage's parameters gradients to be added to, and puts back what these, and its buffers, were.
class LeftAsItWas {
 public:
  explicit LeftAsItWas(const PipelineStage& stage) : stage_(stage) {
    const at::NoGradGuard no_grad;
    for (const auto& [name, parameter] : stage.parameters) {
      gradients_.emplace_back(parameter, parameter.grad());
      if (parameter.requires_grad()) parameter.mutable_grad() = at::zeros_like(parameter);
    }
    for (const Tensor& buffer : buffers()) buffers_.push_back(buffer.clone());
  }
  ~LeftAsItWas() {
    const at::NoGradGuard no_grad;
    for (const auto& [parameter, before] : gradients_) parameter.mutable_grad() = before;
    const Tensors now = buffers();  // the stage may have assigned others
    for (std::size_t i = 0; i < now.size(); ++i) now[i].copy_(buffers_[i]);
  }
  LeftAsItWas(const LeftAsItWas&) = delete;
  LeftAsItWas& operator=(const LeftAsItWas&) = delete;

 private:
  Tensors buffers() const {
    Tensors now;
    if (!stage_.buffers) return now;
    for (const auto& [name, buffer] : stage_.buffers()) now.push_back(buffer);
    return now;
  }

  const PipelineStage& stage_;
  std::vector<std::pair<Tensor, Tensor>> gradients_;  ///< parameters, and their gradients before
  Tensors buffers_;                                   ///< copies
};

std::uint64_t bytes_of(const Tensors& tensors) {
  std::uint64_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.defined() ? tensor.nbytes() : 0;
  return bytes;
}

std::uint64_t positive(std::int64_t bytes) { return bytes > 0 ? static_cast<std::uint64_t>(bytes) : 0; }

std::uint64_t fixed_bytes_of(const PipelineStage& stage, double state_bytes_per_byte) {
  double bytes = 0;
  for (const auto& [name, parameter] : stage.parameters) {
    const auto own = static_cast<double>(parameter.nbytes());
    bytes += parameter.requires_grad() ? own * (2 + state_bytes_per_byte) : own;
  }
  if (stage.buffers) {
    for (const auto& [name, buffer] : stage.buffers()) bytes += static_cast<double>(buffer.nbytes());
  }
  return static_cast<std::uint64_t>(bytes);
}

/// What a stage takes and gives, numbered in this order.
ChunkSkips skips_of(const PipelineStage& stage) {
  ChunkSkips skips;
  std::size_t number = 0;
  for (const std::string& name : stage.takes) skips.takes.emplace_back(number++, name);
  for (const std::string& name : stage.gives) skips.gives.emplace_back(number++, name);
  return skips;
}

/// What a stage costs, and the bytes of what it gives besides its outputs.
struct StageCost {
  PipelineChunkCost chunk;
  std::vector<std::uint64_t> given_bytes;
};

StageCost measure_stage(const PipelineStage& stage, std::uint32_t number, const Tensors& inputs,
                        const MeasurePipelineOptions& options) {
  const at::AutoGradMode records(true);
  PipelineChunk chunk({stage}, number, skips_of(stage));
  const c10::Device device = chunk.device();
  Ledger ledger;
  const auto live = [&] { return ledger.live(device).total(); };
  StageCost of_stage;
  PipelineChunkCost& cost = of_stage.chunk;
  cost.fixed_bytes = fixed_bytes_of(stage, options.state_bytes_per_byte);
  for (const auto& [name, parameter] : stage.parameters)
    cost.gradient_bytes += parameter.requires_grad() ? parameter.nbytes() : 0;
  std::vector<double> forward, input, weight;
  for (std::uint32_t repeat = 0; repeat <= options.repeats; ++repeat) {
    const std::int64_t before = live();
    ledger.reset_peak();
    PassTensors given;
    const std::size_t taken = inputs.size() - stage.takes.size();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensor tensor = inputs[i].defined() ? copy_with_layout(inputs[i]) : inputs[i];
      if (number > 0 && tensor.defined() && tensor.is_floating_point()) tensor.set_requires_grad(true);
      (i < taken ? given.tensors.emplace_back() : given.skips[i - taken]) = std::move(tensor);
    }
    Watch watch(device);
    watch.lap();
    PassTensors outputs = chunk.forward(0, std::move(given), {});
    const double forward_seconds = watch.lap();
    chunk.keep(0, outputs);
    cost.output_bytes = bytes_of(outputs.tensors);
    of_stage.given_bytes.clear();
    for (const auto& [skip, tensor] : outputs.skips) of_stage.given_bytes.push_back(bytes_of({tensor}));
    const std::int64_t forward_peak = ledger.peak(device).bytes.total();
    PassTensors gradients;
    bool has_graph = false;
    std::int64_t gradient_bytes = 0;
    const auto gradient_of = [&](const Tensor& output) {
      if (!output.defined() || !output.requires_grad()) return Tensor();
      has_graph = true;
      gradient_bytes += static_cast<std::int64_t>(output.nbytes());
      return at::ones_like(output);
    };
    for (const Tensor& output : outputs.tensors) gradients.tensors.push_back(gradient_of(output));
    for (const auto& [skip, tensor] : outputs.skips) gradients.skips[skip] = gradient_of(tensor);
    outputs = {};
    const std::int64_t kept = live() - gradient_bytes - before;
    ledger.reset_peak();
    const std::int64_t at_backward = live();
    double input_seconds = 0, weight_seconds = 0;
    std::int64_t kept_after_input = 0;
    if (has_graph) {
      watch.lap();
      chunk.backward_to_inputs(0, gradients);
      input_seconds = watch.lap();
      gradients = {};
      kept_after_input = live() - before;
      watch.lap();
      chunk.backward_to_weights(0);
      weight_seconds = watch.lap();
    }
    chunk.forget();
    if (repeat == 0) continue;
    forward.push_back(forward_seconds);
    input.push_back(input_seconds);
    weight.push_back(weight_seconds);
    cost.kept_bytes = positive(kept);
    cost.kept_after_input_bytes = positive(kept_after_input);
    cost.working_bytes = std::max(positive(forward_peak - before - kept),
                                  positive(ledger.peak(device).bytes.total() - at_backward));
  }
  cost.forward_seconds = median(forward);
  cost.input_seconds = median(input);
  cost.weight_seconds = median(weight);
  return of_stage;
}

/// The last stage, with the loss behind it.
PipelineStage with_loss(PipelineStage stage, const std::function<Tensor(const Tensors&)>& loss) {
  stage.run = [run = stage.run, loss](const Tensors& inputs) -> Tensors {
    const Tensor made = loss(run(inputs));
    check_loss(made, "reef::measure_pipeline");
    return {made};
  };
  return stage;
}

/// Seconds of a product of matrices.
double seconds_of_work(c10::Device device) {
  const at::NoGradGuard no_grad;
  const Tensor matrix = at::ones({384, 384}, device);
  std::vector<double> seconds;
  Watch watch(device);
  for (int repeat = 0; repeat < 9; ++repeat) {
    watch.lap();
    at::mm(matrix, matrix);
    seconds.push_back(watch.lap());
  }
  return median(std::move(seconds));
}

/// Rows of numbers that each rank has, on every rank.
using Rows = std::vector<std::vector<double>>;
std::vector<Rows> shared(const Rows& own, const ProcessGroupPtr& group) {
  std::vector<Rows> all;
  for (const c10::IValue& of_rank : Together(group, c10::kCPU).gather([&] { return c10::IValue(own); }))
    all.push_back(of_rank.to<Rows>());
  return all;
}

/// How fast ranks are, measured one after another; empty if they are alike.
std::vector<double> measure_speeds(c10::Device device, const ProcessGroupPtr& group) {
  double own = 0;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    barrier(group);
    if (rank == group->getRank()) own = seconds_of_work(device);
  }
  std::vector<double> seconds;
  for (const auto& rows : shared({{own}}, group)) seconds.push_back(rows.front().front());
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  std::vector<double> speeds;
  if (*most < 1.1 * *least) return speeds;
  for (const double each : seconds) speeds.push_back(seconds.front() / each);
  return speeds;
}

std::vector<Link> measure_links(const ProcessGroupPtr& group, bool each) {
  const int ranks = group->getSize();
  if (ranks == 1) return {};
  if (!each || ranks == 2) return {measure_link(group).link};
  Rows own;
  for (int a = 0; a < ranks; ++a) {
    for (int b = a + 1; b < ranks; ++b) {
      const std::int64_t both[] = {a, b};
      const ProcessGroupPtr pair = subgroup(group, both);
      if (pair) {
        const Link link = measure_link(pair).link;
        if (group->getRank() == a)
          own.push_back({static_cast<double>(a), static_cast<double>(b), link.latency_seconds,
                         link.bytes_per_second, link.message_seconds});
      }
      barrier(group);  // one pair at a time
    }
  }
  std::vector<Link> links(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks),
                          Link{0, std::numeric_limits<double>::max(), 0});
  for (const auto& rows : shared(own, group)) {
    for (const std::vector<double>& row : rows) {
      const auto a = static_cast<std::size_t>(row[0]), b = static_cast<std::size_t>(row[1]);
      const auto all = static_cast<std::size_t>(ranks);
      links[a * all + b] = links[b * all + a] = {row[2], row[3], row[4]};
    }
  }
  return links;
}

PipelineProfile measure(const std::vector<Pipeline::Maker>& makers, const Tensors& micro_batch,
                        const ProcessGroupPtr& group, const MeasurePipelineOptions& options) {
  if (options.repeats == 0 || makers.empty())
    throw ConfigError("reef::measure_pipeline was given 0 repeats, or no stage: give 1 or more.");
  std::map<std::uint32_t, StageCost> own;
  MadeStages made;
  c10::Device device = c10::kCPU;
  std::vector<Pipeline::Maker> measured;
  for (std::uint32_t number = 0; number < makers.size(); ++number) {
    measured.emplace_back([&, number] {
      PipelineStage stage = makers[number]();
      if (!stage.parameters.empty()) device = stage.parameters.front().second.device();
      made.emplace_back(number, stage);
      PipelineStage wrapped;
      wrapped.gives = stage.gives;
      wrapped.takes = stage.takes;
      wrapped.parameters = stage.parameters;  // which say where it computes
      wrapped.run = [&, number, stage](const Tensors& inputs) {
        const LeftAsItWas left(stage);
        const bool has_loss = options.loss && number + 1 == makers.size();
        own[number] =
            measure_stage(has_loss ? with_loss(stage, options.loss) : stage, number, inputs, options);
        return stage.run(inputs);
      };
      return wrapped;
    });
  }
  const auto ranks = static_cast<std::uint32_t>(group->getSize());
  const auto stages = static_cast<std::uint32_t>(makers.size());
  PipelineSchedule shares = pipeline_schedule("gpipe", {std::min(ranks, stages), 1});
  shares.actions.resize(ranks);  // where there are fewer stages, the last ranks measure none
  Pipeline(measured, group, {.actions = shares}).forward(micro_batch);
  PipelineProfile profile;
  profile.speeds = measure_speeds(device, group);
  profile.links = measure_links(group, options.each_link);
  Rows rows = {{static_cast<double>(options.rank_bytes)}};
  for (const auto& [number, of_stage] : own) {
    const PipelineChunkCost& cost = of_stage.chunk;
    rows.push_back({static_cast<double>(number), cost.forward_seconds, cost.input_seconds,
                    cost.weight_seconds, static_cast<double>(cost.output_bytes),
                    static_cast<double>(cost.kept_bytes), static_cast<double>(cost.kept_after_input_bytes),
                    static_cast<double>(cost.working_bytes), static_cast<double>(cost.fixed_bytes),
                    static_cast<double>(cost.gradient_bytes)});
    for (const std::uint64_t given : of_stage.given_bytes) rows.back().push_back(static_cast<double>(given));
  }
  profile.stages.resize(makers.size());
  std::map<std::uint32_t, std::vector<std::uint64_t>> given_bytes;  // by stage
  std::size_t rank = 0;
  bool is_limited = false;
  for (const auto& of_rank : shared(rows, group)) {
    const double limit = of_rank.front().front();
    is_limited = is_limited || limit > 0;
    profile.rank_bytes.push_back(limit > 0 ? static_cast<std::uint64_t>(limit)
                                           : std::numeric_limits<std::int64_t>::max());
    const double speed = profile.speeds.empty() ? 1 : profile.speeds[rank];
    for (std::size_t i = 1; i < of_rank.size(); ++i) {
      const std::vector<double>& row = of_rank[i];
      const auto bytes = [&](std::size_t column) { return static_cast<std::uint64_t>(row[column]); };
      profile.stages[static_cast<std::size_t>(row[0])] = {row[1] * speed, row[2] * speed, row[3] * speed,
                                                          bytes(4),       bytes(5),       bytes(6),
                                                          bytes(7),       bytes(8),       bytes(9)};
      for (std::size_t column = 10; column < row.size(); ++column)
        given_bytes[static_cast<std::uint32_t>(row[0])].push_back(bytes(column));
    }
    ++rank;
  }
  if (!is_limited) profile.rank_bytes.clear();
  std::map<std::uint32_t, std::size_t> next;  // of what a stage gives
  for (NamedSkip& skip : skips_of_names(tell_names(made, group))) {
    const std::uint32_t from = skip.between_stages.from;
    skip.between_stages.bytes = given_bytes.at(from).at(next[from]++);
    profile.skips.push_back(std::move(skip.between_stages));
  }
  return profile;
}

}  // namespace

PipelineProfile measure_pipeline(const torch::nn::Sequential& modules, const Tensor& micro_batch,
                                 const ProcessGroupPtr& group, const MeasurePipelineOptions& options) {
  return measure(makers_of(stages_of(modules)), {micro_batch}, group, options);
}
PipelineProfile measure_pipeline(const std::vector<PipelineStage>& stages, const Tensors& micro_batch,
                                 const ProcessGroupPtr& group, const MeasurePipelineOptions& options) {
  return measure(makers_of(stages), micro_batch, group, options);
}
PipelineProfile measure_pipeline(const std::vector<Pipeline::Maker>& stages, const Tensors& micro_batch,
                                 const ProcessGroupPtr& group, const MeasurePipelineOptions& options) {
  return measure(stages, micro_batch, group, options);
}

}  // namespace reef
