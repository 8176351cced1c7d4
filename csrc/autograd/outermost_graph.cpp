#include "autograd/outermost_graph.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>
#include <vector>

namespace reef {
namespace {

thread_local int running_nodes = 0;
thread_local std::vector<std::function<void()>> waiting;  // for the end of a graph around the one that ended

void at_end_of_graph(std::function<void()> ended) {
  torch::autograd::Engine::get_default_engine().queue_callback([ended = std::move(ended)] {
    if (running_nodes == 0) return ended();
    waiting.push_back(ended);  // a graph ends within a node of another
  });
}

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction&) {
  ++running_nodes;
  return nullptr;
}

// The node belongs to the graph around the one that has ended within it.
void ends(const at::RecordFunction&, at::ObserverContext*) {
  --running_nodes;
  for (std::function<void()>& ended : std::exchange(waiting, {})) at_end_of_graph(std::move(ended));
}

}  // namespace

OutermostGraphWatch::OutermostGraphWatch()
    : callback_(at::addGlobalCallback(
          at::RecordFunctionCallback(begins, ends).scopes({at::RecordScope::BACKWARD_FUNCTION}))) {}

OutermostGraphWatch::~OutermostGraphWatch() { at::removeCallback(callback_); }

void at_end_of_outermost_graph(std::function<void()> ended) { at_end_of_graph(std::move(ended)); }

}  // namespace reef
