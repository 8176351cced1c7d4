#include "pipeline_run/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace reef {
namespace {

namespace ta = torch::autograd;
using NodePtr = SplitBackward::NodePtr;

/// The weights' gradients of these are matrix products or convolutions.
constexpr std::array<std::string_view, 6> kMayWait = {"AddmmBackward0",  "MmBackward0",
                                                      "BmmBackward0",    "ConvolutionBackward0",
                                                      "LinearBackward0", "BaddbmmBackward0"};
/// Nodes of one input that stand between a parameter and what uses it, and save nothing of use to others.
constexpr std::array<std::string_view, 8> kViews = {
    "TBackward0",      "TransposeBackward0", "PermuteBackward0",    "ViewBackward0",
    "ExpandBackward0", "UnsqueezeBackward0", "UnsafeViewBackward0", "ToCopyBackward0"};

template <std::size_t kCount>
bool is_among(const std::array<std::string_view, kCount>& names, const ta::Node& node) {
  return std::find(names.begin(), names.end(), node.name()) != names.end();
}
bool is_parameter(const ta::Node& node) { return node.name() == "torch::autograd::AccumulateGrad"; }
bool has_hooks(ta::Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty();
}

/// Keeps the gradients with which a node is run.
struct Catch final : ta::FunctionPreHook {
  explicit Catch(ta::variable_list* to) : caught(to) {}
  ta::variable_list operator()(const ta::variable_list& gradients) override {
    *caught = gradients;
    return gradients;
  }
  ta::variable_list* caught;
};

/// Lets go of what a node has saved when it has run, as the engine does where a graph is not kept.
struct Release final : ta::FunctionPostHook {
  explicit Release(ta::Node* of) : node(of) {}
  ta::variable_list operator()(const ta::variable_list& outputs,
                               const ta::variable_list& /*inputs*/) override {
    node->release_variables();
    return outputs;
  }
  ta::Node* node;
};

/// The nodes of a graph, by how many edges each is reached, and those at which it begins.
struct Graph {
  std::vector<NodePtr> nodes;
  std::unordered_map<ta::Node*, int> edges_to;
  std::unordered_set<ta::Node*> inputs;

  Graph(const ta::edge_list& ends, const std::vector<NodePtr>& begins) {
    for (const NodePtr& node : begins) inputs.insert(node.get());
    for (const ta::Edge& end : ends) reach(end);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const ta::Edge& edge : nodes[i]->next_edges()) reach(edge);
    }
  }
  void reach(const ta::Edge& edge) {
    if (edge.is_valid() && edges_to[edge.function.get()]++ == 0) nodes.push_back(edge.function);
  }
};

/// A node that waits: the edges on which its parameters are, and the nodes between it and them.
struct Waiting {
  NodePtr node;
  ta::edge_list parameters;
  std::vector<ta::Node*> between;
  ta::variable_list gradients;
};

/// Follows an edge to a parameter that nothing else of the graph uses. Returns false if there is none.
bool leads_to_own_parameter(const Graph& graph, ta::Edge edge, Waiting& waiting) {
  std::vector<ta::Node*> between;
  for (;;) {
    if (!edge.is_valid() || graph.edges_to.at(edge.function.get()) != 1 || has_hooks(*edge.function) ||
        graph.inputs.contains(edge.function.get())) {
      return false;
    }
    if (is_parameter(*edge.function)) break;
    if (!is_among(kViews, *edge.function) || edge.function->num_outputs() != 1) return false;
    between.push_back(edge.function.get());
    edge = edge.function->next_edge(0);
  }
  waiting.parameters.push_back(edge);
  waiting.between.insert(waiting.between.end(), between.begin(), between.end());
  return true;
}

/// Finds the nodes that may wait. Such a node has a parameter that no other node uses, and passes on a
/// gradient besides.
std::vector<Waiting> find_waiting(const Graph& graph) {
  std::vector<Waiting> found;
  for (const NodePtr& node : graph.nodes) {
    if (!is_among(kMayWait, *node) || has_hooks(*node)) continue;
    Waiting waiting{node, {}, {}, {}};
    bool passes_on = false;
    for (const ta::Edge& edge : node->next_edges()) {
      if (edge.is_valid() && !leads_to_own_parameter(graph, edge, waiting)) passes_on = true;
    }
    if (passes_on && !waiting.parameters.empty()) found.push_back(std::move(waiting));
  }
  return found;
}

void run(const ta::edge_list& from, const ta::variable_list& gradients, bool keeps_graph,
         const ta::edge_list& parameters) {
  if (from.empty()) return;
  ta::Engine::get_default_engine().execute(from, gradients, keeps_graph, /*create_graph=*/false,
                                           /*accumulate_grad=*/true, parameters);
}

}  // namespace

SplitBackward::SplitBackward(ta::edge_list ends, ta::variable_list gradients,
                             const std::vector<NodePtr>& inputs) {
  const bool any_input =
      std::any_of(inputs.begin(), inputs.end(), [](const NodePtr& node) { return node != nullptr; });
  if (!any_input) {
    rest_.push_back({std::move(ends), std::move(gradients), {}});
    return;
  }
  const Graph graph(ends, inputs);
  std::vector<Waiting> waiting = find_waiting(graph);
  if (waiting.empty()) {
    run(ends, gradients, /*keeps_graph=*/false, {});
    return;
  }
  std::unordered_set<ta::Node*> kept;
  for (const Waiting& each : waiting) {
    kept.insert(each.node.get());
    kept.insert(each.between.begin(), each.between.end());
    for (const ta::Edge& parameter : each.parameters) kept.insert(parameter.function.get());
  }
  ta::edge_list at_once;
  for (const NodePtr& node : inputs) {
    if (node && graph.edges_to.contains(node.get())) at_once.emplace_back(node, 0);
  }
  for (const NodePtr& node : graph.nodes) {
    if (is_parameter(*node) && !kept.contains(node.get())) at_once.emplace_back(node, 0);
  }
  for (Waiting& each : waiting) {
    at_once.emplace_back(each.node, 0);  // it is run even if none of its gradients is wanted yet
    each.node->add_pre_hook(std::make_unique<Catch>(&each.gradients));
  }
  for (const NodePtr& node : graph.nodes) {
    if (!kept.contains(node.get()) && !is_parameter(*node))  // which outlive the graph
      node->add_post_hook(std::make_unique<Release>(node.get()));
  }
  const auto forget_hooks = [&] {
    for (const Waiting& each : waiting) each.node->pre_hooks().pop_back();
  };
  try {
    run(ends, gradients, /*keeps_graph=*/true, at_once);
  } catch (...) {
    forget_hooks();
    throw;
  }
  forget_hooks();
  for (const NodePtr& node : graph.nodes) {
    if (!kept.contains(node.get())) node->release_variables();
  }
  for (Waiting& each : waiting) {
    Part part;
    for (std::size_t i = 0; i < each.gradients.size(); ++i) {
      if (!each.gradients[i].defined()) continue;
      part.from.emplace_back(each.node, static_cast<std::uint32_t>(i));
      part.gradients.push_back(each.gradients[i]);
    }
    part.parameters = std::move(each.parameters);
    rest_.push_back(std::move(part));
  }
}

SplitBackward::~SplitBackward() = default;
SplitBackward::SplitBackward(SplitBackward&&) noexcept = default;
SplitBackward& SplitBackward::operator=(SplitBackward&&) noexcept = default;

void SplitBackward::finish() {
  for (Part& part : rest_) {
    run(part.from, part.gradients, /*keeps_graph=*/false, part.parameters);
    part = {};  // frees what its node has saved
  }
  rest_.clear();
}

}  // namespace reef
