#include "shard/module_now.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reef/error.h"
#include "shard/shard_parts.h"
#include "shard/state_of_exchange.h"

namespace reef {

using at::Tensor;

Shard::Named named(const torch::OrderedDict<std::string, Tensor>& given) {
  Shard::Named all;
  for (const auto& item : given) all.emplace_back(item.key(), item.value());
  return all;
}

namespace {

constexpr const char* kRefresh = ": call the shard's refresh(), and make the optimizer anew.";

void check_same(const Shard::Named& before, const Shard::Named& now) {
  const auto tensor_of = [](const Shard::Named& all, const std::string& name) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const auto& entry) { return entry.first == name; });
    return found == all.end() ? nullptr : found->second.unsafeGetTensorImpl();
  };
  for (const auto& [name, tensor] : now) {
    if (tensor_of(before, name) == tensor.unsafeGetTensorImpl()) continue;
    throw ConfigError("parameter " + name +
                      " of the module is not one that it had when reef::shard was called" + kRefresh);
  }
  for (const auto& [name, tensor] : before) {
    if (tensor_of(now, name) != nullptr) continue;
    throw ConfigError("parameter " + name + " is not the module's any more" + kRefresh);
  }
}

// What is remembered of parameters that are still there, of their shape, by the names that they have now.
OptimizerState::Communication named_as_in(const Shard::Named& now, const DividedParameters& before,
                                          const Reducer& reducer, OptimizerState::Communication state) {
  std::map<std::string, std::string> names;
  for (auto named = now.rbegin(); named != now.rend(); ++named) {  // the first name counts
    const auto& [name, tensor] = *named;
    for (std::size_t item = 0; item < before.parameters.size(); ++item) {
      const ReducedParameter& one = before.parameters[item];
      const bool is_there = one.tensor.is_same(tensor) && tensor.sizes() == reducer.flat_place_of(item).shape;
      if (is_there && tensor.requires_grad()) names[one.name] = name;
    }
  }
  for (auto& [rank, values] : state.of_ranks) {
    NamedState kept;
    for (auto& [name, of_name] : values) {
      const bool whole = names.contains(name);
      const PieceName piece = whole ? PieceName{name} : parse_piece_name(name);
      const auto known = names.find(piece.parameter);
      if (known == names.end()) continue;
      kept.emplace_back(whole ? known->second : piece_name(known->second, piece.first, piece.last),
                        std::move(of_name));
    }
    values = std::move(kept);
  }
  return state;
}

}  // namespace

Shard::ModuleNow look_at(torch::nn::Module& module) {
  const std::weak_ptr<torch::nn::Module> weak = module.weak_from_this();
  if (weak.expired()) return {};
  const auto check = [weak, before = named(module.named_parameters()), tensors = module.parameters()] {
    const auto alive = weak.lock();
    if (alive == nullptr) return;
    const auto same = [](const Tensor& a, const Tensor& b) { return a.is_same(b); };
    const std::vector<Tensor> now = alive->parameters();
    if (std::equal(now.begin(), now.end(), tensors.begin(), tensors.end(), same)) return;
    check_same(before, named(alive->named_parameters()));
  };
  const auto buffers = [weak]() -> std::optional<Shard::Named> {
    const auto alive = weak.lock();
    if (alive == nullptr) return std::nullopt;
    return named(alive->named_buffers());
  };
  return {check, buffers};
}

bool Shard::Parts::has_its_memory(std::size_t item) const {
  return memory.empty() || divided.parameters[item].tensor.storage().unsafeGetStorageImpl() ==
                               memory[item].unsafeGetStorageImpl();
}

void Shard::Parts::check_parameters() const {
  for (std::size_t i = 0; i < divided.parameters.size(); ++i) {
    const std::string& name = divided.parameters[i].name;
    if (has_its_memory(i) && reducer->hears_of(i)) continue;
    throw ConfigError(
        "parameter " + name +
        " has been given other memory since reef::shard (by torch::load into the module, by double() or the "
        "like, or by set_data): do that before it, load by Shard::load_state_dict(), or call refresh().");
  }
  for (const auto& [name, tensor] : frozen) {
    if (!tensor.requires_grad()) continue;
    throw ConfigError("parameter " + name +
                      " requires a gradient and did not when reef::shard was called, so each rank has one of "
                      "its own" +
                      kRefresh);
  }
  if (module_now.check_parameters) module_now.check_parameters();
}

void Shard::Parts::look_at_buffers() {
  if (!module_now.buffers) return;
  if (auto now = module_now.buffers()) all_buffers = std::move(*now);
}

void Shard::Parts::check_module() {
  check_parameters();
  look_at_buffers();
}

// If it has the memory that it had.
std::optional<std::string> Shard::Parts::name_of(const Tensor& parameter) const {
  for (std::size_t i = 0; i < divided.parameters.size(); ++i) {
    if (!divided.parameters[i].tensor.is_same(parameter)) continue;
    return has_its_memory(i) ? std::optional(divided.parameters[i].name) : std::nullopt;
  }
  for (const auto& [name, tensor] : frozen) {
    if (tensor.is_same(parameter)) return name;
  }
  return std::nullopt;
}

void Shard::refresh(torch::nn::Module& module) {
  refresh(named(module.named_parameters()), named(module.named_buffers()), look_at(module));
}

void Shard::refresh(const Named& parameters, const Named& buffers, ModuleNow module_now) {
  const at::NoGradGuard no_grad;
  Parts& old = *parts_;
  if (old.update != nullptr || old.no_sync > 0 || old.local_sums > 0 || old.begin_round)
    throw ConfigError(
        "refresh() was called in local_sums, with LocalUpdates, beside a DelayedUpdate or in no_sync: end "
        "that "
        "first.");
  old.note("refresh()");
  // Masters have bits that the module's parameters do not.
  std::map<std::string, Tensor> masters;
  if (old.options.mixed_precision) {
    const StateDict before = old.full_state_dict(/*rank0_only=*/false);
    for (const auto& [name, tensor] : parameters) {
      if (const auto was = old.name_of(tensor)) masters[name] = before.at(*was);
    }
  }
  const OptimizerState::Communication held_back = named_as_in(
      parameters, old.divided, *old.reducer, StateOfExchange(old.divided, *old.reducer).whole(/*keep=*/true));
  if (old.gatherer) old.gatherer->gather();
  const ShardOptions options = old.options;
  std::optional<ExchangePrices> prices = std::move(old.prices);
  const std::shared_ptr<GivenMomentum> momentum = old.momentum;
  const ProcessGroupPtr group = old.divided.group;
  parts_.reset();
  *this = Shard(parameters, buffers, group, options, std::move(module_now));
  parts_->prices = std::move(prices);
  if (momentum && !has_parts(options))  // optimizers and gradients are the same
    parts_->momentum->go_on_from(*momentum, parts_->parameters);
  try {
    StateOfExchange exchange(parts_->divided, *parts_->reducer);
    exchange.load(exchange.resharded({held_back}));
  } catch (const ConfigError&) {  // on all ranks
    if (parts_->gatherer) parts_->gatherer->gather();
    parts_.reset();
    throw;
  }
  if (masters.empty()) return;
  StateDict now = full_state_dict();
  for (const auto& [name, values] : masters) {
    if (now.contains(name)) now.insert_or_assign(name, values);
  }
  load_state_dict({now});
}

}  // namespace reef
