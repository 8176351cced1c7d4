#include "autograd/outermost_graph.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fork.h"
#include "observer/global_callback.h"
#include "reef/error.h"

namespace reef {
namespace {

thread_local int running_nodes = 0;
class Ending;
thread_local std::vector<std::shared_ptr<Ending>>
    waiting;  // for the end of a graph around the one that ended

// What becomes of the graph that runs on this thread. Autograd shows two of a graph's members, and not the
// graph.
c10::intrusive_ptr<at::ivalue::Future> result_of_graph() {
  using torch::autograd::GraphTask;
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (nodes == nullptr) return {};
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr std::size_t kOffset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const auto* const graph =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const std::byte*>(nodes) - kOffset);
  return graph->future_result_;
}

// Of a graph, and then of the one around it, up to the outermost. A graph that fails forgets its callbacks,
// and with the last of them this ends.
class Ending {
 public:
  Ending(std::function<void()> ended, std::function<void(const std::string&)> failed)
      : ended_(std::move(ended)), failed_(std::move(failed)) {}
  ~Ending() {
    if (!over_) failed_(error());
  }
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;

  static void await(const std::shared_ptr<Ending>& self) {
    self->result_ = result_of_graph();
    torch::autograd::Engine::get_default_engine().queue_callback([self] {
      if (running_nodes > 0) return waiting.push_back(self);  // this graph ends within a node of another
      self->over_ = true;
      self->ended_();
    });
  }

 private:
  std::string error() const {
    try {
      if (result_ && result_->hasError()) std::rethrow_exception(result_->exception_ptr());
    } catch (const std::exception& error) {
      return message_of(error);
    } catch (...) {
      // Nothing is known of it.
    }
    return "";
  }

  std::function<void()> ended_;
  std::function<void(const std::string&)> failed_;
  c10::intrusive_ptr<at::ivalue::Future> result_;
  bool over_ = false;
};

using Begins = std::shared_ptr<const std::function<void()>>;

// They share one callback.
struct Watches {
  MutexAtFork mutex{AtFork::Order::kTables};
  GlobalCallback callback;
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
  for (const std::shared_ptr<Ending>& each : std::exchange(waiting, {})) Ending::await(each);
}

}  // namespace

OutermostGraphWatch::OutermostGraphWatch(std::function<void()> begins)
    : begins_(std::make_shared<const std::function<void()>>(std::move(begins))) {
  const std::lock_guard lock(watches().mutex);
  watches().begins.push_back(begins_);
  watches().callback.add(
      at::RecordFunctionCallback(reef::begins, ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

OutermostGraphWatch::~OutermostGraphWatch() {
  const std::lock_guard lock(watches().mutex);
  std::erase(watches().begins, begins_);
  if (watches().begins.empty()) watches().callback.remove();
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

void at_end_of_outermost_graph(std::function<void()> ended, std::function<void(const std::string&)> failed) {
  Ending::await(std::make_shared<Ending>(std::move(ended), std::move(failed)));
}

}  // namespace reef
