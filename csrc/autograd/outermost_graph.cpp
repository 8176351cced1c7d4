#include "autograd/outermost_graph.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fork.h"

namespace reef {
namespace {

thread_local int running_nodes = 0;
thread_local std::vector<std::function<void()>> waiting;  // for the end of a graph around the one that ended

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction&) {
  ++running_nodes;
  return nullptr;
}

// The node belongs to the graph around the one that has ended within it.
void ends(const at::RecordFunction&, at::ObserverContext*) {
  --running_nodes;
  for (std::function<void()>& ended : std::exchange(waiting, {})) at_end_of_outermost_graph(std::move(ended));
}

// They share one callback.
struct Watches {
  MutexAtFork mutex{AtFork::Order::kTables};
  int count = 0;
  at::CallbackHandle callback = 0;
};
Watches& watches() {
  static auto* const all = new Watches;
  return *all;
}

}  // namespace

OutermostGraphWatch::OutermostGraphWatch() {
  const std::lock_guard lock(watches().mutex);
  if (watches().count++ > 0) return;
  watches().callback = at::addGlobalCallback(
      at::RecordFunctionCallback(begins, ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

OutermostGraphWatch::~OutermostGraphWatch() {
  const std::lock_guard lock(watches().mutex);
  if (--watches().count == 0) at::removeCallback(watches().callback);
}

bool runs_within_another_graph() { return running_nodes > 0; }

void at_end_of_outermost_graph(std::function<void()> ended) {
  torch::autograd::Engine::get_default_engine().queue_callback([ended = std::move(ended)] {
    if (running_nodes == 0) return ended();
    waiting.push_back(ended);  // this graph ends within a node of another
  });
}

}  // namespace reef
