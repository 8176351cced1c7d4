#include "pipeline_run/chunk.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>

#include "compat.h"
#include "reef/checkpoint.h"
#include "surroundings.h"

namespace reef {
namespace {

namespace ta = torch::autograd;
using at::Tensor;
using NodePtr = decltype(ta::Edge::function);

/// Stands where a chunk's input was made, and keeps its gradient.
struct ChunkBegin final : ta::Node {
  ta::variable_list apply(ta::variable_list&& gradients) override {
    gradient = std::move(gradients.at(0));
    return {};
  }
  std::string name() const override { return "PipelineChunkBegin"; }
  Tensor gradient;
};

std::uint64_t mixed(std::uint64_t x) {  // splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

void seed_generators(const std::vector<c10::Device>& devices, PipelineSeed seed, std::uint32_t micro_batch,
                     std::uint32_t stage) {
  const std::uint64_t call = seed.call + micro_batch / seed.micro_batches_per_call;
  const std::uint64_t place =
      std::uint64_t{stage} << 32 | (seed.first_micro_batch + micro_batch % seed.micro_batches_per_call);
  const std::uint64_t number = mixed(mixed(mixed(seed.seed) ^ call) ^ place);
  const auto set = [&](c10::Device device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(number);
  };
  set(c10::kCPU);
  for (const c10::Device device : devices) set(device);
}

thread_local std::optional<std::uint32_t> micro_batch_now;

}  // namespace

std::optional<std::uint32_t> pipeline_micro_batch() { return micro_batch_now; }
MicroBatchScope::MicroBatchScope(std::uint32_t number) : before_(std::exchange(micro_batch_now, number)) {}
MicroBatchScope::~MicroBatchScope() { micro_batch_now = before_; }

PipelineChunk::PipelineChunk(std::vector<PipelineStage> stages, std::uint32_t first_stage, bool recomputes)
    : stages_(std::make_shared<const std::vector<PipelineStage>>(std::move(stages))),
      first_stage_(first_stage),
      recomputes_(recomputes) {
  for (const PipelineStage& stage : *stages_) {
    if (stage.parameters.empty()) continue;
    device_ = stage.parameters.front().second.device();
    break;
  }
}

PipelineChunk::Tensors PipelineChunk::trained() const {
  Tensors once;
  for (const PipelineStage& stage : *stages_) {
    for (const auto& [name, parameter] : stage.parameters) {
      const auto is_same = [&, &given = parameter](const Tensor& known) { return known.is_same(given); };
      if (parameter.requires_grad() && std::none_of(once.begin(), once.end(), is_same))
        once.push_back(parameter);
    }
  }
  return once;
}

PipelineChunk::Tensors PipelineChunk::forward(std::uint32_t micro_batch, ChunkInput input,
                                              PipelineSeed seed) {
  Graph graph;
  for (std::size_t i = 0; i < input.tensors.size(); ++i) {
    NodePtr& node = graph.inputs.emplace_back();
    Tensor& tensor = input.tensors[i];
    if (!tensor.defined() || !input.requires_grad[i] || !at::GradMode::is_enabled()) continue;
    node = compat::make_node<ChunkBegin, NodePtr>();
    ta::create_gradient_edge(tensor, node);
  }
  const std::vector<c10::Device> devices =
      device_.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{device_};
  const SurroundingsScope generators_are_kept{Surroundings(devices)};
  const auto run = [stages = stages_, first = first_stage_, devices, seed, micro_batch,
                    told = pipeline_micro_batch().value_or(micro_batch)](Tensors tensors) {
    const MicroBatchScope again(told);  // on the thread that computes it once more
    for (std::uint32_t i = 0; i < stages->size(); ++i) {
      seed_generators(devices, seed, micro_batch, first + i);
      tensors = (*stages)[i].run(tensors);
    }
    return tensors;
  };
  Tensors outputs;
  if (recomputes_ && at::GradMode::is_enabled()) {
    // Stages may modify their inputs, and the recomputation needs them as they were.
    const auto run_again = [run](const Tensors& given) {
      Tensors copies;
      for (const Tensor& tensor : given) copies.push_back(tensor.defined() ? tensor.clone() : tensor);
      return run(std::move(copies));
    };
    const CheckpointRegion region(run_again, input.tensors, {.devices = devices});
    outputs = run_again(input.tensors);
  } else {
    outputs = run(std::move(input.tensors));
  }
  if (at::GradMode::is_enabled()) graphs_[micro_batch] = std::move(graph);
  return outputs;
}

void PipelineChunk::keep(std::uint32_t micro_batch, const Tensors& ends) {
  Graph& graph = graphs_.at(micro_batch);
  for (const Tensor& end : ends) {
    const bool is_differentiable = end.defined() && end.requires_grad();
    graph.ends.push_back(is_differentiable ? ta::impl::gradient_edge(end) : ta::Edge());
    graph.devices.push_back(end.defined() ? end.device() : c10::Device(c10::kCPU));
  }
}

PipelineChunk::Graph PipelineChunk::take(std::uint32_t micro_batch) {
  return std::move(graphs_.extract(micro_batch).mapped());
}

std::pair<ta::edge_list, ta::variable_list> PipelineChunk::Graph::begin(const Tensors& gradients) const {
  std::pair<ta::edge_list, ta::variable_list> found;
  for (std::size_t i = 0; i < ends.size() && i < gradients.size(); ++i) {
    if (!ends[i].is_valid() || !gradients[i].defined()) continue;
    found.first.push_back(ends[i]);
    found.second.push_back(gradients[i].to(devices[i]));
  }
  return found;
}

PipelineChunk::Tensors PipelineChunk::Graph::take_gradients_of_inputs() const {
  Tensors gradients;
  for (const NodePtr& node : inputs)
    gradients.push_back(node ? std::move(static_cast<ChunkBegin&>(*node).gradient) : Tensor());
  return gradients;
}

PipelineChunk::Tensors PipelineChunk::backward(std::uint32_t micro_batch, const Tensors& gradients) {
  const Graph graph = take(micro_batch);
  const auto [ends, given] = graph.begin(gradients);
  if (!ends.empty()) {
    ta::Engine::get_default_engine().execute(ends, given, /*keep_graph=*/false, /*create_graph=*/false,
                                             /*accumulate_grad=*/true);
  }
  return graph.take_gradients_of_inputs();
}

PipelineChunk::Tensors PipelineChunk::backward_to_inputs(std::uint32_t micro_batch,
                                                         const Tensors& gradients) {
  const Graph graph = take(micro_batch);
  auto [ends, given] = graph.begin(gradients);
  halves_.emplace(micro_batch, SplitBackward(std::move(ends), std::move(given), graph.inputs));
  return graph.take_gradients_of_inputs();
}

void PipelineChunk::backward_to_weights(std::uint32_t micro_batch) {
  halves_.extract(micro_batch).mapped().finish();
}

void PipelineChunk::forget() {
  graphs_.clear();
  halves_.clear();
}

}  // namespace reef
