#include "autograd/outermost_graph.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fork.h"

namespace reef {
namespace {

thread_local int running_nodes = 0;
thread_local std::vector<std::function<void()>> waiting;  // for the end of a graph around the one that ended

using Begins = std::shared_ptr<const std::function<void()>>;

// They share one callback.
struct Watches {
  MutexAtFork mutex{AtFork::Order::kTables};
  at::CallbackHandle callback = 0;
  std::vector<Begins> begins;
};
Watches& watches() {
  static auto* const all = new Watches;
  return *all;
}

void graph_begins() {
  std::vector<Begins> told;
  {
    const std::lock_guard lock(watches().mutex);
    told = watches().begins;
  }
  for (const Begins& each : told) (*each)();
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction&) {
  static thread_local int last_graph = -1;
  if (running_nodes++ > 0) return nullptr;
  const int graph = torch::autograd::get_current_graph_task_id();
  if (graph >= 0 && std::exchange(last_graph, graph) != graph) graph_begins();
  return nullptr;
}

// The node belongs to the graph around the one that has ended within it.
void ends(const at::RecordFunction&, at::ObserverContext*) {
  --running_nodes;
  for (std::function<void()>& ended : std::exchange(waiting, {})) at_end_of_outermost_graph(std::move(ended));
}

}  // namespace

OutermostGraphWatch::OutermostGraphWatch(std::function<void()> begins)
    : begins_(std::make_shared<const std::function<void()>>(std::move(begins))) {
  const std::lock_guard lock(watches().mutex);
  watches().begins.push_back(begins_);
  if (watches().begins.size() > 1) return;
  watches().callback = at::addGlobalCallback(
      at::RecordFunctionCallback(reef::begins, ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

OutermostGraphWatch::~OutermostGraphWatch() {
  const std::lock_guard lock(watches().mutex);
  std::erase(watches().begins, begins_);
  if (watches().begins.empty()) at::removeCallback(watches().callback);
}

bool graph_runs(const torch::autograd::Node& node) {
  // They ask for pointers that are not const.
  auto* const key =
      const_cast<torch::autograd::Node*>(&node);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr || !nodes->contains(key)) return false;
  const auto* const needed = torch::autograd::get_current_graph_task_exec_info();
  if (needed == nullptr || needed->empty()) return true;  // all of them
  const auto found = needed->find(key);
  return found != needed->end() && found->second.needed_;
}

bool runs_within_another_graph() { return running_nodes > 0; }

void at_end_of_outermost_graph(std::function<void()> ended) {
  torch::autograd::Engine::get_default_engine().queue_callback([ended = std::move(ended)] {
    if (running_nodes == 0) return ended();
    waiting.push_back(ended);  // this graph ends within a node of another
  });
}

}  // namespace reef
