#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"
#include "reef/part.h"
#include "reef/shard.h"
#include "shard/shard_parts.h"

namespace reef {

using at::Tensor;

namespace {

Tensor copy_on_cpu(const Tensor& tensor) { return tensor.detach().to(at::kCPU, false, /*copy=*/true); }

// A model's state has one value for each name.
StateValues value(const Tensor& tensor) { return {{"", tensor}}; }

void check_fits(const std::string& name, const Tensor& given, const Tensor& own, at::IntArrayRef sizes) {
  std::ostringstream text;
  if (given.sizes() != sizes) {
    text << name << " has the shape " << given.sizes() << " in the state that is loaded and " << sizes
         << " here; build the module as it was";
  } else if (given.is_complex() && !own.is_complex()) {
    text << name << " is of " << c10::toString(given.scalar_type()) << " in the state that is loaded and of "
         << c10::toString(own.scalar_type())
         << " here, which has no imaginary parts; build the module as it was";
  } else {
    return;
  }
  throw ConfigError(text.str());
}

// What there is to save and to load.
struct Known {
  Known(const Shard::Named& parameters, const Shard::Named& buffers, const DividedParameters& divided,
        const DividedParameters& frozen) {
    for (const ReducedParameter& one : divided.parameters) trained.emplace(one.name, one.tensor);
    for (const ReducedParameter& one : frozen.parameters) rounded.emplace(one.name, one.tensor);
    std::map<const void*, std::string> of_tensor;
    for (const auto& [name, tensor] : parameters) {
      const std::string& first = of_tensor.emplace(tensor.unsafeGetTensorImpl(), name).first->second;
      first_name.emplace(name, first);
      if (trained.count(first) + rounded.count(first) == 0) alike.emplace(first, tensor);
    }
    for (const auto& [name, tensor] : buffers) alike.emplace(name, tensor);
  }

  // An entry of a state dict: a parameter or a part of one, or what all ranks have whole.
  struct Sorted {
    NamedState trained, rounded, alike;
  };
  void sort(const std::string& key, const Tensor& tensor, Sorted& to) const {
    const bool whole = first_name.count(key) > 0 || alike.count(key) > 0;
    PieceName piece = whole ? PieceName{key} : parse_piece_name(key);
    if (const auto known = first_name.find(piece.parameter); known != first_name.end())
      piece.parameter = known->second;
    const auto find = [&](const auto& in) {
      const auto found = in.find(piece.parameter);
      return found != in.end() ? &found->second : nullptr;
    };
    const Tensor* const is_trained = find(trained);
    const Tensor* const is_rounded = find(rounded);
    const Tensor* const is_alike = find(alike);
    if (whole) {
      const Tensor& own = is_trained != nullptr   ? *is_trained
                          : is_rounded != nullptr ? *is_rounded
                                                  : *is_alike;
      check_fits(key, tensor, own, own.sizes());
      NamedState& list = is_trained != nullptr ? to.trained : is_rounded != nullptr ? to.rounded : to.alike;
      list.emplace_back(piece.parameter, value(tensor));
    } else if ((is_trained != nullptr || is_rounded != nullptr) && piece.last >= piece.first) {
      const Tensor& own = is_trained != nullptr ? *is_trained : *is_rounded;
      const std::int64_t elements = piece.last - piece.first;
      check_fits(key, tensor, own,
                 tensor.dim() == 1 ? std::vector<std::int64_t>{elements} : part_shape(own, elements));
      (is_trained != nullptr ? to.trained : to.rounded)
          .emplace_back(piece_name(piece.parameter, piece.first, piece.last), value(tensor));
    } else {
      throw ConfigError("the state that is loaded has " + key +
                        ", which the module has not; build it as it was, or leave that out");
    }
  }

  std::map<std::string, std::string, std::less<>> first_name;  ///< of all that a parameter has
  std::map<std::string, Tensor, std::less<>> trained;          ///< by first name
  std::map<std::string, Tensor, std::less<>> rounded;          ///< by first name: see Frozen16
  std::map<std::string, Tensor, std::less<>> alike;            ///< by name: frozen or ignored ones, buffers
};

}  // namespace

StateDict Shard::full_state_dict(bool rank0_only) {
  parts_->note("full_state_dict()");
  agree(parts_->divided, [&] { parts_->check_module(); });
  return parts_->full_state_dict(rank0_only);
}

StateDict Shard::Parts::full_state_dict(bool rank0_only) const {
  const at::NoGradGuard no_grad;
  NamedState own;
  agree(divided, [&] {
    wait_for_update();
    for (std::size_t i = 0; i < names.size(); ++i) own.emplace_back(names[i], value(parameters[i]));
  });
  const bool keep = !rank0_only || divided.group->getRank() == 0;
  std::map<std::string, Tensor> whole;
  for (auto& [name, values] : whole_state(divided, own, keep))
    whole.emplace(name, values.front().second.toTensor());
  own.clear();
  if (const DividedParameters& rounded = frozen16.divided(); !rounded.parameters.empty()) {
    agree(divided, [&] { own = frozen16.own(); });
    for (auto& [name, values] : whole_state(rounded, own, keep))
      whole.emplace(name, values.front().second.toTensor());
  }
  StateDict dict;
  agree(divided, [&] {
    if (!keep) return;
    const Known known(all_parameters, all_buffers, divided, frozen16.divided());
    for (const auto& [name, tensor] : all_parameters) {
      const auto found = whole.find(known.first_name.at(name));
      dict.insert(name, found != whole.end() ? found->second : copy_on_cpu(tensor));  // alike
    }
    for (const auto& [name, tensor] : all_buffers) dict.insert(name, copy_on_cpu(tensor));
  });
  return dict;
}

StateDict Shard::sharded_state_dict() const {
  parts_->check_module();
  parts_->wait_for_update();
  const Parts& parts = *parts_;
  StateDict dict;
  for (std::size_t i = 0; i < parts.names.size(); ++i) {
    const Tensor& part = parts.parameters[i];
    const auto place = part_of(part);
    if (part.numel() > 0 || !place || place->whole_elements == 0) dict.insert(parts.names[i], part.detach());
  }
  for (const auto& [name, values] : parts.frozen16.own()) dict.insert(name, values.front().second.toTensor());
  const Known known(parts.all_parameters, parts.all_buffers, parts.divided, parts.frozen16.divided());
  for (const auto& [name, tensor] : known.alike) dict.insert(name, tensor.detach());
  return dict;
}

void Shard::load_state_dict(const std::vector<StateDict>& given) { parts_->prepared_load(given)(); }

std::function<void()> Shard::Parts::prepared_load(const std::vector<StateDict>& given) {
  note("load_state_dict()");
  const at::NoGradGuard no_grad;
  Parts& parts = *this;
  agree(divided, [&] { check_module(); });
  finish_update();
  const DividedParameters& rounded_here = parts.frozen16.divided();
  const Known known(parts.all_parameters, parts.all_buffers, parts.divided, rounded_here);
  std::vector<NamedState> trained, rounded;
  NamedState alike;
  agree(parts.divided, [&] {
    for (const StateDict& dict : given) {
      if (dict.empty()) continue;
      Known::Sorted sorted;
      for (const auto& entry : dict) known.sort(entry.key(), entry.value(), sorted);
      trained.push_back(std::move(sorted.trained));
      rounded.push_back(std::move(sorted.rounded));
      alike.insert(alike.end(), sorted.alike.begin(), sorted.alike.end());
    }
  });
  DividedParameters whole_frozen = rounded_here;  // every rank has all of each, rounded
  whole_frozen.divided = false;
  NamedState of_frozen, none;
  if (!rounded_here.parameters.empty()) of_frozen = own_state(whole_frozen, rounded, none);
  std::map<std::string, Tensor> found;
  for (const auto& [name, values] : own_state(parts.divided, trained, alike))
    found.emplace(name, values.front().second.toTensor());
  for (const auto& [name, values] : alike) found.emplace(name, values.front().second.toTensor());
  Frozen16::Loaded loaded;
  agree(parts.divided, [&] {
    const auto need = [&](const std::string& name, bool there) {
      if (!there)
        throw ConfigError(name + " is missing in the state that is loaded; give a state of the whole module");
    };
    for (std::size_t i = 0; i < parts.names.size(); ++i) {
      if (parts.parameters[i].numel() > 0) need(parts.names[i], found.count(parts.names[i]) > 0);
    }
    for (const auto& [name, tensor] : known.rounded) {
      need(name, std::any_of(of_frozen.begin(), of_frozen.end(),
                             [&, key = name](const auto& entry) { return entry.first == key; }));
    }
    for (const auto& [name, tensor] : known.alike) need(name, found.count(name) > 0);
    loaded = parts.frozen16.prepared(of_frozen);
  });
  return [&parts, found = std::move(found), loaded = std::move(loaded), alike_here = known.alike] {
    const at::NoGradGuard no_grad_here;
    if (parts.gatherer) parts.gatherer->expect_step();  // parts are written, as by an optimizer
    for (std::size_t i = 0; i < parts.names.size(); ++i) {
      if (const auto one = found.find(parts.names[i]); one != found.end())
        parts.parameters[i].copy_(one->second);
    }
    parts.frozen16.load(loaded);
    for (const auto& [name, tensor] : alike_here) tensor.copy_(found.at(name));
    if (parts.begin_round) parts.begin_round();
  };
}

}  // namespace reef
