#include "reef/chain.h"

#include <torch/nn/modules/container/sequential.h>

#include <map>
#include <mutex>
#include <numeric>
#include <sstream>
#include <utility>

#include "reef/error.h"

namespace reef {
namespace {

/// Another one for each module, even where one stands that was freed.
std::uint64_t serial_of(const std::shared_ptr<torch::nn::Module>& module) {
  struct Known {
    std::weak_ptr<torch::nn::Module> module;
    std::uint64_t serial = 0;
  };
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::map<const torch::nn::Module*, Known>;
  static std::size_t many = 64;
  static std::uint64_t last = 0;
  const std::lock_guard lock(*mutex);
  Known& known = (*all)[module.get()];
  if (known.module.lock() != module) known = {module, ++last};
  const std::uint64_t serial = known.serial;
  if (all->size() > many) {
    std::erase_if(*all, [](const auto& entry) { return entry.second.module.expired(); });
    many = 2 * all->size() + 64;
  }
  return serial;
}

// "." is frozen, "+" has a gradient and "-" has none.
char mark_of(const at::Tensor& tensor, bool gradients) {
  if (!tensor.requires_grad()) return '.';
  return gradients && tensor.is_leaf() && tensor.grad().defined() ? '+' : '-';
}

void describe(std::ostringstream& text, const at::Tensor& tensor, bool gradients) {
  if (!tensor.defined()) return;
  text << mark_of(tensor, gradients) << tensor.scalar_type() << tensor.device() << tensor.sizes();
}

}  // namespace

Chain::Chain(const std::vector<Stage>& stages) {
  for (const Stage& stage : stages) add(std::to_string(links_.size()), stage);
}

Chain::Chain(const torch::nn::Sequential& modules) {
  const auto names = modules->named_children();
  std::size_t index = 0;
  for (const torch::nn::AnyModule& module : *modules) {
    add(names[index++].key(), module.ptr(),
        [own = torch::nn::AnyModule(module)](const at::Tensor& input) mutable { return own.forward(input); });
  }
  check_ = [of = std::weak_ptr(modules.ptr()), index] {
    const auto sequential = of.lock();
    if (!sequential || sequential->size() == index) return;
    throw ConfigError("Chain: the Sequential that it was made of had " + std::to_string(index) +
                      " layers, and has " + std::to_string(sequential->size()) +
                      " now; make a Chain of it once more");
  };
}

void Chain::add(std::string name, Stage stage, State state) {
  links_.push_back({std::move(name), std::move(stage), std::move(state)});
}

void Chain::add(std::string name, std::shared_ptr<torch::nn::Module> module, Stage stage) {
  add(name, std::move(stage), [module](bool gradients) { return chain_state_of(module, gradients); });
  links_.back().modules = {{std::move(name), std::move(module)}};
}

at::Tensor Chain::operator()(at::Tensor input) const {
  check_current();
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
  before.state = [first = std::move(before.state), second = behind.state](bool gradients) {
    return (first ? first(gradients) : "") + ";" + (second ? second(gradients) : "");
  };
  before.modules.insert(before.modules.end(), behind.modules.begin(), behind.modules.end());
  before.parts += behind.parts;
  links_.erase(links_.begin() + static_cast<std::ptrdiff_t>(stage));
}

std::vector<std::size_t> Chain::parts() const {
  std::vector<std::size_t> parts;
  for (const Link& link : links_) parts.push_back(link.parts);
  return parts;
}

void Chain::join_to(const std::vector<std::size_t>& parts) {
  const std::vector<std::size_t> own = this->parts();
  if (std::accumulate(parts.begin(), parts.end(), std::size_t{0}) !=
      std::accumulate(own.begin(), own.end(), std::size_t{0})) {
    throw ConfigError("Chain: parts of another number of stages; profile the chain anew");
  }
  for (std::size_t stage = 0; stage < parts.size(); ++stage) {
    while (links_[stage].parts < parts[stage]) join(stage + 1);
  }
}

std::string Chain::state(bool gradients) const {
  std::string text;
  for (const Link& link : links_) text += (link.state ? link.state(gradients) : std::string()) + ";";
  return text;
}

void Chain::check_current() const {
  if (check_) check_();
}

std::string chain_state_of(const std::shared_ptr<torch::nn::Module>& module, bool gradients) {
  std::ostringstream text;
  const auto add = [&](const std::shared_ptr<torch::nn::Module>& each) {
    text << '#' << serial_of(each) << (each->is_training() ? 't' : 'e');
    for (const at::Tensor& parameter : each->parameters(/*recurse=*/false))
      describe(text, parameter, gradients);
    for (const at::Tensor& buffer : each->buffers(/*recurse=*/false)) describe(text, buffer, gradients);
  };
  add(module);
  for (const auto& each : module->modules(/*include_self=*/false)) add(each);
  return text.str();
}

}  // namespace reef
