#include "pipeline_run/undeclared.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <sstream>
#include <vector>

#include "reef/error.h"

namespace reef {
namespace {

namespace ta = torch::autograd;

/// Visits once each node that can be reached from the edges, except those in `known`, and adds it to them.
template <class Visit>
void for_each_node(const ta::edge_list& from, std::unordered_set<ta::Node*>& known, const Visit& visit) {
  std::vector<ta::Node*> found;
  const auto reach = [&](const ta::Edge& edge) {
    if (edge.is_valid() && known.insert(edge.function.get()).second) found.push_back(edge.function.get());
  };
  for (const ta::Edge& edge : from) reach(edge);
  while (!found.empty()) {
    ta::Node* const node = found.back();
    found.pop_back();
    visit(*node);
    for (const ta::Edge& edge : node->next_edges()) reach(edge);
  }
}

}  // namespace

void check_declared(const ta::edge_list& ends, const ta::edge_list& inputs,
                    const std::unordered_set<const c10::TensorImpl*>& declared) {
  std::unordered_set<ta::Node*> known;
  for_each_node(inputs, known, [](const ta::Node&) {});
  for_each_node(ends, known, [&](const ta::Node& node) {
    const auto* const leaf = dynamic_cast<const ta::AccumulateGrad*>(&node);
    if (leaf == nullptr || declared.contains(leaf->variable.unsafeGetTensorImpl())) return;
    std::ostringstream text;
    text << "reef::Pipeline: a stage or the loss trains a tensor of sizes " << leaf->variable.sizes()
         << " that is none of this chunk's parameters, so that its gradient would be neither divided nor "
            "added up: make it a parameter of the stage that uses it (registered in its module), of one for "
            "the loss if need be; or detach it.";
    throw ConfigError(text.str());
  });
}

}  // namespace reef
