#include "pipeline_run/chunk.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "compat.h"
#include "pipeline_run/undeclared.h"
#include "pipeline_run/unmodified_tensors.h"
#include "reef/checkpoint.h"
#include "reef/error.h"
#include "surroundings.h"
#include "tensor_layout.h"

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

constexpr std::uint32_t kChecked = 2;  // micro-batches: one of each direction

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

using Tensors = PipelineStage::Tensors;

/// Runs stages, and has them run once more before their backward pass. Since they may modify their inputs,
/// they are given copies, which lie in memory as the inputs do: otherwise kernels could sum in another order.
template <class Run>
Tensors run_recomputed(const Run& run, const Tensors& tensors, const std::vector<c10::Device>& devices) {
  const auto run_again = [run](const Tensors& given) {
    Tensors copies;
    for (const Tensor& tensor : given) {
      Tensor& copy = copies.emplace_back(tensor.defined() ? copy_with_layout(tensor) : tensor);
      if (tensor.defined() && tensor.requires_grad())
        ta::impl::set_gradient_edge(copy, ta::impl::gradient_edge(tensor));
    }
    return run(std::move(copies));
  };
  const CheckpointRegion region(run_again, tensors, {.devices = devices});
  return run_again(tensors);
}

}  // namespace

std::optional<std::uint32_t> pipeline_micro_batch() { return micro_batch_now; }
MicroBatchScope::MicroBatchScope(std::uint32_t number) : before_(std::exchange(micro_batch_now, number)) {}
MicroBatchScope::~MicroBatchScope() { micro_batch_now = before_; }

PipelineChunk::PipelineChunk(std::vector<PipelineStage> stages, std::uint32_t first_stage, ChunkSkips skips,
                             const RecomputedRuns& recomputed)
    : is_first_(first_stage == 0), skips_(std::move(skips)) {
  bool has_device = false;
  for (std::uint32_t number = first_stage; PipelineStage & stage : stages) {
    if (!has_device && !stage.parameters.empty()) {
      device_ = stage.parameters.front().second.device();
      has_device = true;
    }
    for (const auto& [name, parameter] : stage.parameters) declared_.insert(parameter.unsafeGetTensorImpl());
    const auto run = std::find_if(recomputed.begin(), recomputed.end(), [&](const RecomputedRun& each) {
      return number >= each.first && number < each.end;
    });
    const bool recomputes = run != recomputed.end();
    const bool begins =
        parts_.empty() || recomputes != parts_.back()->recomputes || (recomputes && number == run->first);
    if (begins) parts_.push_back(std::make_shared<Part>(Part{{}, number, recomputes}));
    parts_.back()->stages.push_back(std::move(stage));
    ++number;
  }
  name_skips();
}

/// A part takes what parts or chunks before it give, and gives what others behind it take.
void PipelineChunk::name_skips() {
  const auto is_among = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<std::string> taken_behind;
  for (const auto& [number, name] : skips_.gives) taken_behind.push_back(name);
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    std::vector<std::string> given;
    for (const PipelineStage& stage : (*part)->stages) {
      for (const std::string& name : stage.takes) {
        if (!is_among(given, name) && !is_among((*part)->takes, name)) (*part)->takes.push_back(name);
      }
      for (const std::string& name : stage.gives) {
        given.push_back(name);
        if (is_among(taken_behind, name)) (*part)->gives.push_back(name);
      }
    }
    taken_behind.insert(taken_behind.end(), (*part)->takes.begin(), (*part)->takes.end());
  }
}

PipelineChunk::Tensors PipelineChunk::trained() const {
  Tensors once;
  for (const auto& part : parts_) {
    for (const PipelineStage& stage : part->stages) {
      for (const auto& [name, parameter] : stage.parameters) {
        const auto is_same = [&, &given = parameter](const Tensor& known) { return known.is_same(given); };
        if (parameter.requires_grad() && std::none_of(once.begin(), once.end(), is_same))
          once.push_back(parameter);
      }
    }
  }
  return once;
}

namespace {

/// Takes the last tensors away.
Tensors take_last(Tensors& tensors, std::size_t count) {
  const auto first = tensors.end() - static_cast<std::ptrdiff_t>(count);
  Tensors last(std::make_move_iterator(first), std::make_move_iterator(tensors.end()));
  tensors.erase(first, tensors.end());
  return last;
}

/// The tensors of skips by their names, which must not be modified.
class Known {
 public:
  void learn(const std::string& name, const Tensor& tensor) {
    tensors_[name] = tensor;
    unmodified_.add(tensor, name);
  }
  const Tensor& at(const std::string& name) const { return tensors_.at(name); }
  void check() const {
    if (const std::string* const name = unmodified_.find_modified())
      throw ConfigError("reef::Pipeline: '" + *name +
                        "' was modified in place after a stage had given it to others, which would have "
                        "other values where the model is cut elsewhere: give a clone, or modify one.");
  }

 private:
  std::map<std::string, Tensor> tensors_;
  UnmodifiedTensors<std::string> unmodified_;
};

}  // namespace

PipelineChunk::Tensors PipelineChunk::Part::run(
    Tensors tensors, const std::function<void(std::uint32_t stage)>& before_stage) const {
  Known known;
  const Tensors taken = take_last(tensors, takes.size());
  for (std::size_t i = 0; i < taken.size(); ++i) known.learn(takes[i], taken[i]);
  for (std::uint32_t number = first_stage; const PipelineStage& stage : stages) {
    for (const std::string& name : stage.takes) tensors.push_back(known.at(name));
    before_stage(number++);
    tensors = stage.run(tensors);
    if (tensors.size() < stage.gives.size())
      throw ConfigError("reef::Pipeline: a stage that gives '" + stage.gives.front() + "' has returned " +
                        std::to_string(tensors.size()) + " tensors: what it gives comes last among them.");
    const Tensors given = take_last(tensors, stage.gives.size());
    // With an alias, the gradients of all takers are summed before they are added to those of other uses,
    // wherever chunks end.
    for (std::size_t i = 0; i < given.size(); ++i)
      known.learn(stage.gives[i], given[i].defined() ? at::alias(given[i]) : given[i]);
  }
  known.check();
  for (const std::string& name : gives) tensors.push_back(known.at(name));
  return tensors;
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
  Known known;
  for (const auto& [number, name] : skips_.takes) {
    Tensor& taken = input.skips.at(number);
    graph.taken[number] = begin_at(taken);
    known.learn(name, taken);
  }
  input.skips.clear();
  const std::vector<c10::Device> devices =
      device_.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{device_};
  const SurroundingsScope generators_are_kept{Surroundings(devices)};
  for (const std::shared_ptr<Part>& part : parts_) {
    for (const std::string& name : part->takes) tensors.push_back(known.at(name));
    const auto run = [part, devices, seed, micro_batch,
                      told = pipeline_micro_batch().value_or(micro_batch)](Tensors given) {
      const MicroBatchScope again(told);  // on the thread that computes it once more
      return part->run(std::move(given),
                       [&](std::uint32_t stage) { seed_generators(devices, seed, micro_batch, stage); });
    };
    tensors = part->recomputes && records ? run_recomputed(run, std::move(tensors), devices)
                                          : run(std::move(tensors));
    const Tensors given = take_last(tensors, part->gives.size());
    for (std::size_t i = 0; i < given.size(); ++i) known.learn(part->gives[i], given[i]);
  }
  known.check();
  if (records) graphs_[micro_batch] = std::move(graph);
  PassTensors outputs{std::move(tensors)};
  for (const auto& [number, name] : skips_.gives) outputs.skips[number] = known.at(name);
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
  if (micro_batch >= kChecked) return;
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
