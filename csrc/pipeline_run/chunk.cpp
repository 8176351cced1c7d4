#include "pipeline_run/chunk.h"

#include <ATen/core/grad_mode.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <memory>
#include <utility>

#include "compat.h"
#include "pipeline_run/undeclared.h"
#include "reef/error.h"
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

std::vector<std::string> names_of(const std::vector<std::pair<std::size_t, std::string>>& numbered) {
  std::vector<std::string> names;
  for (const auto& [number, name] : numbered) names.push_back(name);
  return names;
}

}  // namespace

PipelineChunk::PipelineChunk(std::vector<PipelineStage> stages, std::uint32_t first_stage, ChunkSkips skips,
                             const RecomputedRuns& recomputed)
    : is_first_(first_stage == 0),
      stages_(std::move(stages), first_stage, recomputed, names_of(skips.takes), names_of(skips.gives)),
      skips_(std::move(skips)) {
  bool has_device = false;
  for (const PipelineStage& stage : stages_.stages()) {
    if (!has_device && !stage.parameters.empty()) {
      device_ = stage.parameters.front().second.device();
      has_device = true;
    }
    for (const auto& [name, parameter] : stage.parameters) declared_.insert(parameter.unsafeGetTensorImpl());
  }
}

PipelineChunk::Tensors PipelineChunk::trained() const {
  Tensors once;
  for (const PipelineStage& stage : stages_.stages()) {
    for (const auto& [name, parameter] : stage.parameters) {
      const auto is_same = [&, &given = parameter](const Tensor& known) { return known.is_same(given); };
      if (parameter.requires_grad() && std::none_of(once.begin(), once.end(), is_same))
        once.push_back(parameter);
    }
  }
  return once;
}

PassTensors PipelineChunk::forward(std::uint32_t micro_batch, PassTensors input, PipelineSeed seed) {
  Graph graph;
  const bool records = at::GradMode::is_enabled();
  const auto begin_at = [&](Tensor& tensor) {
    NodePtr node;
    if (!tensor.defined() || !tensor.requires_grad()) return node;
    if (is_first_) {
      graph.of_program.push_back(ta::impl::gradient_edge(tensor));
      return node;
    }
    tensor.set_requires_grad(false);
    if (!records) return node;
    node = compat::make_node<ChunkBegin, NodePtr>();
    ta::create_gradient_edge(tensor, node);
    return node;
  };
  for (Tensor& tensor : input.tensors) graph.inputs.push_back(begin_at(tensor));
  Tensors tensors = std::move(input.tensors);
  for (const auto& [number, name] : skips_.takes) {
    Tensor& taken = input.skips.at(number);
    graph.taken[number] = begin_at(taken);
    tensors.push_back(taken);
  }
  input.skips.clear();
  const std::vector<c10::Device> devices =
      device_.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{device_};
  const SurroundingsScope generators_are_kept{Surroundings(devices)};
  tensors = stages_({devices, seed, micro_batch}, std::move(tensors));
  if (records) graphs_[micro_batch] = std::move(graph);
  PassTensors outputs;
  Tensors given = take_last(tensors, skips_.gives.size());
  for (std::size_t i = 0; i < given.size(); ++i) outputs.skips[skips_.gives[i].first] = std::move(given[i]);
  outputs.tensors = std::move(tensors);
  return outputs;
}

void PipelineChunk::keep(std::uint32_t micro_batch, const PassTensors& ends) {
  Graph& graph = graphs_.at(micro_batch);
  const auto end_at = [](const Tensor& tensor) {
    const bool is_differentiable = tensor.defined() && tensor.requires_grad();
    return End{is_differentiable ? ta::impl::gradient_edge(tensor) : ta::Edge(),
               tensor.defined() ? tensor.device() : c10::Device(c10::kCPU)};
  };
  for (const Tensor& tensor : ends.tensors) graph.ends.push_back(end_at(tensor));
  for (const auto& [number, tensor] : ends.skips) graph.given[number] = end_at(tensor);
  if (first_micro_batch_ && micro_batch > *first_micro_batch_) return;
  first_micro_batch_ = micro_batch;
  ta::edge_list all;
  for (const End& end : graph.ends) all.push_back(end.edge);
  for (const auto& [number, end] : graph.given) all.push_back(end.edge);
  check_declared(all, graph.of_program, declared_);
}

PipelineChunk::Graph PipelineChunk::take(std::uint32_t micro_batch) {
  return std::move(graphs_.extract(micro_batch).mapped());
}

std::pair<ta::edge_list, ta::variable_list> PipelineChunk::Graph::begin(const PassTensors& gradients) const {
  std::pair<ta::edge_list, ta::variable_list> found;
  const auto add = [&](const ta::Edge& edge, const Tensor& gradient, c10::Device device) {
    if (!edge.is_valid() || !gradient.defined()) return;
    found.first.push_back(edge);
    found.second.push_back(gradient.to(device));
  };
  for (const auto& [number, gradient] : gradients.skips) {
    if (const auto here = taken.find(number); here != taken.end()) {
      if (here->second) add(ta::Edge(here->second, 0), gradient, gradient.device());
    } else {
      add(given.at(number).edge, gradient, given.at(number).device);
    }
  }
  for (std::size_t i = 0; i < ends.size() && i < gradients.tensors.size(); ++i)
    add(ends[i].edge, gradients.tensors[i], ends[i].device);
  return found;
}

std::vector<PipelineChunk::NodePtr> PipelineChunk::Graph::all_inputs() const {
  std::vector<NodePtr> all = inputs;
  for (const auto& [number, node] : taken) all.push_back(node);
  return all;
}

PassTensors PipelineChunk::Graph::take_gradients_of_inputs() const {
  PassTensors gradients;
  const auto gradient_at = [](const NodePtr& node) {
    return node ? std::move(static_cast<ChunkBegin&>(*node).gradient) : Tensor();
  };
  for (const NodePtr& node : inputs) gradients.tensors.push_back(gradient_at(node));
  for (const auto& [number, node] : taken) gradients.skips[number] = gradient_at(node);
  return gradients;
}

PassTensors PipelineChunk::backward(std::uint32_t micro_batch, const PassTensors& gradients) {
  const Graph graph = take(micro_batch);
  const auto [ends, given] = graph.begin(gradients);
  if (!ends.empty()) {
    ta::Engine::get_default_engine().execute(ends, given, /*keep_graph=*/false, /*create_graph=*/false,
                                             /*accumulate_grad=*/true);
  }
  return graph.take_gradients_of_inputs();
}

PassTensors PipelineChunk::backward_to_inputs(std::uint32_t micro_batch, const PassTensors& gradients) {
  const Graph graph = take(micro_batch);
  auto [ends, given] = graph.begin(gradients);
  halves_.emplace(micro_batch, SplitBackward(std::move(ends), std::move(given), graph.all_inputs()));
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
