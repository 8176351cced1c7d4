#pragma once

#include <functional>
#include <memory>
#include <string>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace reef {

/// While one lives, at_end_of_outermost_graph() may be called, and `begins` is, before the first node that a
/// thread runs of a graph which no other graph runs within: once for each such thread. It must not throw.
/// Cost: 0.2 us for each node of backward, on every thread.
class OutermostGraphWatch {
 public:
  explicit OutermostGraphWatch(std::function<void()> begins);
  ~OutermostGraphWatch();
  OutermostGraphWatch(const OutermostGraphWatch&) = delete;
  OutermostGraphWatch& operator=(const OutermostGraphWatch&) = delete;

 private:
  std::shared_ptr<const std::function<void()>> begins_;
};

/// To be called by a hook, while a graph runs backward. Calls `ended` when the outermost graph has
/// ended of those that this thread runs within each other (a re-entrant checkpoint runs one of its own in the
/// middle of backward). If a graph of these fails, `failed` is called in its place, with what the graph has
/// thrown ("", where that is not known); it must not throw.
void at_end_of_outermost_graph(std::function<void()> ended, std::function<void(const std::string&)> failed);

/// Whether the graph that runs on this thread will run `node`, as far as can be known when it begins: what a
/// node runs in a graph of its own (a re-entrant checkpoint) is not.
bool graph_runs(const torch::autograd::Node& node);

/// Whether the graph that runs is not the outermost one. For hooks that run before or after a node.
bool runs_within_another_graph();

}  // namespace reef
