#include "shard/state_rules.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <string_view>

#include "reef/error.h"
#include "shard/flat.h"

namespace reef {
namespace {

using at::Tensor;
using c10::IValue;
using Group = OptimizerState::Group;
using Values = OptimizerState::Values;

// Options that some rules have and others have not. What schedulers add, and how a step is made (foreach,
// fused), says nothing of a rule, nor does what came with a later version of torch.
constexpr const char* kMissed[] = {
    "betas", "momentum", "dampening",  "alpha", "centered",          "lr_decay",      "rho",
    "lambd", "etas",     "step_sizes", "eps",   "trust_coefficient", "momentum_decay"};
constexpr const char* kBesides[] = {"amsgrad"};

// What LibTorch's and reef's classes keep of each element of a parameter that has taken a step; some of it
// only with an option that is on.
struct Kept {
  std::string_view rule;
  const char* state;
  const char* option = nullptr;
};
constexpr Kept kKept[] = {
    {"Adam", "exp_avg"},     {"Adam", "exp_avg_sq"},     {"Adam", "max_exp_avg_sq", "amsgrad"},
    {"AdamW", "exp_avg"},    {"AdamW", "exp_avg_sq"},    {"AdamW", "max_exp_avg_sq", "amsgrad"},
    {"NAdam", "exp_avg"},    {"NAdam", "exp_avg_sq"},    {"RAdam", "exp_avg"},
    {"RAdam", "exp_avg_sq"}, {"Adamax", "exp_avg"},      {"Adamax", "exp_inf"},
    {"LAMB", "exp_avg"},     {"LAMB", "exp_avg_sq"},     {"LARS", "momentum_buffer"},
    {"Lion", "exp_avg"},     {"RMSprop", "square_avg"},  {"RMSprop", "grad_avg", "centered"},
    {"Adagrad", "sum"},      {"Adadelta", "square_avg"}, {"Adadelta", "acc_delta"},
    {"Rprop", "prev"},       {"Rprop", "step_size"},     {"ASGD", "ax"}};

// Its class's name, if it is LibTorch's or reef's, in C++ or in Python.
std::string_view known_rule(std::string_view rule) {
  const bool known = rule.starts_with("torch::optim::") || rule.starts_with("reef::optim::") ||
                     rule.starts_with("torch.optim.") || rule.starts_with("reef.optim.");
  return known ? rule.substr(rule.find_last_of(".:") + 1) : std::string_view();
}

const IValue* find(const Values& values, const std::string& key) {
  const auto found =
      std::find_if(values.begin(), values.end(), [&](const auto& entry) { return entry.first == key; });
  return found == values.end() ? nullptr : &found->second;
}

bool is_on(const IValue& option) { return option.isBool() && option.toBool(); }

std::string keys_of(const Values& values) {
  std::string all;
  for (const auto& [key, value] : values) all += (all.empty() ? "" : ", ") + key;
  return all.empty() ? "nothing" : all;
}

std::string text_of(const IValue& value) {
  std::ostringstream text;
  if (value.isTensor()) {
    text << "a tensor of shape " << value.toTensor().sizes();
    if (value.toTensor().numel() == 1) text << ", " << value.toTensor().item();
  } else if (value.isDouble()) {
    text << value.toDouble();
  } else {
    text << value;
  }
  return text.str();
}

bool same(const IValue& a, const IValue& b) {
  if (a.isTensor() && b.isTensor()) {
    const Tensor x = a.toTensor(), y = b.toTensor();
    return x.defined() == y.defined() && (!x.defined() || (x.dtype() == y.dtype() && x.equal(y)));
  }
  if (a.isTuple() && b.isTuple()) {
    const auto& x = a.toTupleRef().elements();
    const auto& y = b.toTupleRef().elements();
    if (x.size() != y.size()) return false;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (!same(x[i], y[i])) return false;
    }
    return true;
  }
  if ((a.isDouble() || a.isInt()) && (b.isDouble() || b.isInt())) {
    const double x = a.toScalar().toDouble(), y = b.toScalar().toDouble();
    return x == y || (x != x && y != y);
  }
  return a.tagKind() == b.tagKind() && a == b;
}

void check_options(std::size_t g, const Values& own, const Values& given) {
  const auto refuse = [&](const char* option, const char* with, const char* without) {
    throw ConfigError(
        "group " + std::to_string(g) + " of " + with + " has the option " + option + ", and " + without +
        " has not (it has " + keys_of(with == std::string("the optimizer") ? given : own) +
        "): it is of another rule; load it into an optimizer of the class that it was saved of");
  };
  const char* const optimizer = "the optimizer";
  const char* const state = "the state that is loaded";
  for (const char* const option : kMissed) {
    if (find(own, option) != nullptr && find(given, option) == nullptr) refuse(option, optimizer, state);
  }
  for (const char* const option : kMissed) {
    if (find(given, option) != nullptr && find(own, option) == nullptr) refuse(option, state, optimizer);
  }
  for (const char* const option : kBesides) {
    if (find(given, option) != nullptr && find(own, option) == nullptr) refuse(option, state, optimizer);
  }
}

void check_kept(std::string_view rule, const std::string& name, const Values& own, const Values& options,
                const Values& values, const Tensor& parameter, const PieceName& piece) {
  const std::string of_it = "the state that is loaded of " + name;
  for (const auto& [keeper, state, option] : kKept) {
    if (keeper != rule) continue;
    const IValue* const said = option != nullptr ? find(options, option) : nullptr;
    if (option != nullptr && (said == nullptr || !is_on(*said))) continue;
    const IValue* const found = find(values, state);
    if (found == nullptr || !found->isTensor() || !found->toTensor().defined()) {
      throw ConfigError(of_it + " has no " + state + ", which the optimizer's rule keeps (it has " +
                        keys_of(values) + "); give a state of the same rule");
    }
    const Tensor& tensor = found->toTensor();
    const std::int64_t elements = (piece.last < 0 ? parameter.numel() : piece.last) - piece.first;
    const bool codes = tensor.scalar_type() == at::kByte;
    if (codes && find(own, "state") == nullptr) {
      throw ConfigError(of_it + " has " + state +
                        " in a format of few bits (reef.optim), which the optimizer "
                        "has not; load it into reef.optim's, and give its torch_state_dict()");
    }
    const bool fits =
        codes || (tensor.numel() == elements && (tensor.dim() <= 1 || tensor.sizes() == parameter.sizes() ||
                                                 tensor.sizes() == part_shape(parameter, elements)));
    if (fits) continue;
    std::ostringstream text;
    text << of_it << " has " << state << " of the shape " << tensor.sizes()
         << " for a parameter of the shape " << parameter.sizes()
         << "; give a state of the same model and rule";
    throw ConfigError(text.str());
  }
}

}  // namespace

void check_rule(const DividedParameters& all, const std::string& rule, const std::vector<Group>& own,
                const OptimizerState& given) {
  std::map<std::string, std::pair<std::size_t, std::string>> place;  // of an id
  for (std::size_t g = 0; g < own.size(); ++g) {
    const Group& group = given.groups[g];
    check_options(g, own[g].options, group.options);
    for (std::size_t i = 0; i < group.ids.size() && i < group.names.size(); ++i)
      place.emplace(group.ids[i], std::pair(g, group.names[i]));
  }
  std::map<std::string, Tensor> parameters;
  for (const ReducedParameter& one : all.parameters) parameters.emplace(one.name, one.tensor);
  for (const auto& [id, values] : given.states) {
    const auto found = place.find(id);
    if (found == place.end() || values.empty()) continue;
    const auto& [g, name] = found->second;
    const bool whole = parameters.count(name) > 0;
    const PieceName piece = whole ? PieceName{name} : parse_piece_name(name);
    const auto parameter = parameters.find(piece.parameter);
    if (parameter == parameters.end() || (!whole && piece.first == piece.last)) continue;
    check_kept(known_rule(rule), name, own[g].options, given.groups[g].options, values, parameter->second,
               piece);
  }
}

std::string difference(const std::vector<Group>& first, const std::vector<Group>& other, bool values) {
  if (first.size() != other.size()) {
    return "have " + std::to_string(first.size()) + " and " + std::to_string(other.size()) +
           " parameter groups";
  }
  for (std::size_t g = 0; g < first.size(); ++g) {
    const Values& a = first[g].options;
    const Values& b = other[g].options;
    const std::string group = " in group " + std::to_string(g);
    for (const auto& [key, value] : a) {
      const IValue* const found = find(b, key);
      if (found == nullptr) return "have, and have not, the option " + key + group;
      if (values && !same(value, *found))
        return "have " + key + " " + text_of(value) + " and " + text_of(*found) + group;
    }
    for (const auto& [key, value] : b) {
      if (find(a, key) == nullptr) return "have not, and have, the option " + key + group;
    }
  }
  return "";
}

}  // namespace reef
