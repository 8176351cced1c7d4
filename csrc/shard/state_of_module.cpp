#include <ATen/core/grad_mode.h>

#include <map>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"
#include "reef/shard.h"
#include "shard/shard_parts.h"

namespace reef {

using at::Tensor;

namespace {

Tensor copy_on_cpu(const Tensor& tensor) { return tensor.detach().to(at::kCPU, false, /*copy=*/true); }

// A model's state has one value for each name.
StateValues value(const Tensor& tensor) { return {{"", tensor}}; }

void check_shape(const std::string& name, const Tensor& given, at::IntArrayRef sizes) {
  if (given.sizes() == sizes) return;
  std::ostringstream text;
  text << name << " has the shape " << given.sizes() << " in the state that is loaded and " << sizes
       << " here; build the module as it was";
  throw ConfigError(text.str());
}

// What there is to save and to load.
struct Known {
  Known(const Shard::Named& parameters, const Shard::Named& buffers, const DividedParameters& divided) {
    for (const ReducedParameter& one : divided.parameters) trained.emplace(one.name, one.tensor);
    std::map<const void*, std::string> of_tensor;
    for (const auto& [name, tensor] : parameters) {
      const std::string& first = of_tensor.emplace(tensor.unsafeGetTensorImpl(), name).first->second;
      first_name.emplace(name, first);
      if (trained.count(first) == 0) alike.emplace(first, tensor);
    }
    for (const auto& [name, tensor] : buffers) alike.emplace(name, tensor);
  }

  // Sorts an entry of a state dict: a parameter or a part of one, or what all ranks have whole.
  void sort(const std::string& key, const Tensor& tensor, NamedState& divided, NamedState& undivided) const {
    const bool whole = first_name.count(key) > 0 || alike.count(key) > 0;
    PieceName piece = whole ? PieceName{key} : parse_piece_name(key);
    if (const auto known = first_name.find(piece.parameter); known != first_name.end())
      piece.parameter = known->second;
    const auto same = alike.find(piece.parameter);
    const auto found = trained.find(piece.parameter);
    if (whole) {
      const bool is_alike = same != alike.end();
      check_shape(key, tensor, (is_alike ? same : found)->second.sizes());
      (is_alike ? undivided : divided).emplace_back(piece.parameter, value(tensor));
    } else if (found != trained.end() && piece.last >= 0) {
      check_shape(key, tensor, {piece.last - piece.first});
      divided.emplace_back(piece_name(piece.parameter, piece.first, piece.last), value(tensor));
    } else {
      throw ConfigError("the state that is loaded has " + key +
                        ", which the module has not; build it as it was, or leave that out");
    }
  }

  std::map<std::string, std::string, std::less<>> first_name;  ///< of all that a parameter has
  std::map<std::string, Tensor, std::less<>> trained;          ///< by first name
  std::map<std::string, Tensor, std::less<>> alike;            ///< by name: frozen or ignored ones, buffers
};

}  // namespace

StateDict Shard::full_state_dict(bool rank0_only) {
  const at::NoGradGuard no_grad;
  parts_->check_module();
  parts_->wait_for_update();
  const Parts& parts = *parts_;
  NamedState own;
  for (std::size_t i = 0; i < parts.names.size(); ++i)
    own.emplace_back(parts.names[i], value(parts.parameters[i]));
  const bool keep = !rank0_only || parts.divided.group->getRank() == 0;
  std::map<std::string, Tensor> whole;
  for (auto& [name, values] : whole_state(parts.divided, own, keep))
    whole.emplace(name, values.front().second.toTensor());
  StateDict dict;
  if (!keep) return dict;
  const Known known(parts.all_parameters, parts.all_buffers, parts.divided);
  for (const auto& [name, tensor] : parts.all_parameters) {
    const auto found = whole.find(known.first_name.at(name));
    dict.insert(name, found != whole.end() ? found->second : copy_on_cpu(tensor));  // alike, or empty
  }
  for (const auto& [name, tensor] : parts.all_buffers) dict.insert(name, copy_on_cpu(tensor));
  return dict;
}

StateDict Shard::sharded_state_dict() const {
  parts_->check_module();
  parts_->wait_for_update();
  const Parts& parts = *parts_;
  StateDict dict;
  for (std::size_t i = 0; i < parts.names.size(); ++i)
    dict.insert(parts.names[i], parts.parameters[i].detach());
  const Known known(parts.all_parameters, parts.all_buffers, parts.divided);
  for (const auto& [name, tensor] : known.alike) dict.insert(name, tensor.detach());
  return dict;
}

void Shard::load_state_dict(const std::vector<StateDict>& given) {
  const at::NoGradGuard no_grad;
  parts_->check_module();
  parts_->finish_update();
  Parts& parts = *parts_;
  const Known known(parts.all_parameters, parts.all_buffers, parts.divided);
  std::vector<NamedState> pieces;
  NamedState undivided;
  agree(parts.divided, [&] {
    for (const StateDict& dict : given) {
      if (dict.empty()) continue;
      NamedState& divided = pieces.emplace_back();
      for (const auto& entry : dict) known.sort(entry.key(), entry.value(), divided, undivided);
    }
  });
  std::map<std::string, Tensor> found;
  for (const auto& [name, values] : own_state(parts.divided, pieces, undivided))
    found.emplace(name, values.front().second.toTensor());
  for (const auto& [name, values] : undivided) found.emplace(name, values.front().second.toTensor());
  agree(parts.divided, [&] {
    const auto need = [&](const std::string& name) {
      if (found.count(name) == 0)
        throw ConfigError(name + " is missing in the state that is loaded; give a state of the whole module");
    };
    for (std::size_t i = 0; i < parts.names.size(); ++i) {
      if (parts.parameters[i].numel() > 0) need(parts.names[i]);
    }
    for (const auto& [name, tensor] : known.alike) need(name);
  });
  if (parts.gatherer) parts.gatherer->expect_step();  // parts are written, as by an optimizer
  for (std::size_t i = 0; i < parts.names.size(); ++i) {
    if (const auto one = found.find(parts.names[i]); one != found.end())
      parts.parameters[i].copy_(one->second);
  }
  for (const auto& [name, tensor] : known.alike) tensor.copy_(found.at(name));
}

}  // namespace reef
