#include "autograd/saved_tensors.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>
#include <vector>

#include "compat.h"

namespace reef {
namespace {

namespace ta = torch::autograd;

struct Scope {
  SavedTensorScope::Make make;
  std::size_t python_depth;  ///< how many of Python's hooks were in force when it began
};

std::vector<Scope>& scopes() {
  static thread_local std::vector<Scope> stack;
  return stack;
}

std::size_t python_depth() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

/// The type of a node's pointer differs between versions.
using NodePtr = decltype(ta::Edge::function);

class AskingEngine final : public ta::Engine {
 public:
  explicit AskingEngine(ta::Engine& behind) : behind_(behind) {}
  ~AskingEngine() override { stop(); }

  std::unique_ptr<ta::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const std::vector<Scope>& all = scopes();
    if (!all.empty() && python_depth() <= all.back().python_depth) return all.back().make();
    return behind_.get_default_saved_variable_hooks();
  }

  ta::variable_list execute(const ta::edge_list& roots, const ta::variable_list& inputs, bool keep_graph,
                            bool create_graph, bool accumulate_grad, const ta::edge_list& outputs) override {
    return behind_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<ta::GraphTask>& task,
                                                                 NodePtr root,
                                                                 ta::InputBuffer&& inputs) override {
    return behind_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }
  std::unique_ptr<ta::AnomalyMetadata> make_anomaly_metadata() override {
    return behind_.make_anomaly_metadata();
  }
  void thread_on_exception(const std::shared_ptr<ta::GraphTask>& task, const NodePtr& node,
                           std::exception& error) override {
    behind_.thread_on_exception(task, node, error);
  }
  void thread_init(int device, const std::shared_ptr<ta::ReadyQueue>& queue, bool should_increment) override {
    behind_.thread_init(device, queue, should_increment);
  }
  REEF_FORWARD_NODE_CREATION_HOOKS(behind_)

 private:
  ta::Engine& behind_;
};

ta::Engine* engine_behind = nullptr;

// Never destroyed, as the engine behind it is not.
ta::Engine& asking_engine() {
  static auto* const engine = new AskingEngine(*engine_behind);
  return *engine;
}

void install() {
  static const bool once = [] {
    engine_behind = &ta::Engine::get_default_engine();
    ta::set_default_engine_stub(&asking_engine);
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

SavedTensorScope::SavedTensorScope(Make make) {
  install();
  scopes().push_back({std::move(make), python_depth()});
}

SavedTensorScope::~SavedTensorScope() { scopes().pop_back(); }

}  // namespace reef
