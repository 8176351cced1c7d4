#include "reef/chain.h"

#include <torch/nn/modules/container/sequential.h>

#include <utility>

namespace reef {

Chain::Chain(const std::vector<Stage>& stages) {
  for (const Stage& stage : stages) add(std::to_string(links_.size()), stage);
}

Chain::Chain(const torch::nn::Sequential& modules) {
  const auto names = modules->named_children();
  std::size_t index = 0;
  for (const torch::nn::AnyModule& module : *modules) {
    add(names[index++].key(),
        [own = torch::nn::AnyModule(module)](const at::Tensor& input) mutable { return own.forward(input); });
  }
}

void Chain::add(std::string name, Stage stage) { links_.push_back({std::move(name), std::move(stage)}); }

at::Tensor Chain::operator()(at::Tensor input) const {
  for (const Link& link : links_) input = link.stage(input);
  return input;
}

void Chain::join(std::size_t stage) {
  Link& before = links_.at(stage - 1);
  const Link& behind = links_.at(stage);
  before.name += " " + behind.name;
  before.stage = [first = std::move(before.stage), second = behind.stage](const at::Tensor& input) {
    return second(first(input));
  };
  links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(stage));
}

}  // namespace reef
