// What all ranks' exchanges remember, put together and divided anew.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <set>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"
#include "shard/state_of_exchange.h"
#include "shard/together.h"

namespace reef {

using at::Tensor;
using c10::IValue;
using Communication = OptimizerState::Communication;

namespace {

IValue packed_communication(const Communication& all) {
  std::vector<IValue> of_ranks;
  for (const auto& [rank, values] : all.of_ranks)
    of_ranks.emplace_back(c10::ivalue::Tuple::create({IValue(rank), packed_state(values)}));
  return c10::ivalue::Tuple::create({IValue(all.method), IValue(all.ranks), packed_state({{"", all.numbers}}),
                                     IValue(c10::ivalue::Tuple::create(std::move(of_ranks)))});
}

Communication unpacked_communication(const IValue& packed) {
  const auto& parts = packed.toTupleRef().elements();
  Communication all{parts[0].toStringRef(), parts[1].toInt(), unpacked_state(parts[2]).front().second, {}};
  for (const IValue& one : parts[3].toTupleRef().elements()) {
    const auto& of_rank = one.toTupleRef().elements();
    all.of_ranks.push_back({of_rank[0].toInt(), unpacked_state(of_rank[1])});
  }
  return all;
}

std::string text_of_numbers(const OptimizerState::Values& numbers) {
  std::string text;
  for (const auto& [name, number] : numbers)
    text += (text.empty() ? "" : ", ") + name + " " + std::to_string(number.toInt());
  return text.empty() ? "no numbers" : text;
}

std::string compression(const std::string& method) {
  return "compression " + (method.empty() ? "none" : method);
}

}  // namespace

Communication StateOfExchange::in_bucket(const Communication& from, std::size_t bucket) const {
  std::set<std::string> names;
  for (const ShardPiece& piece : all_.layout.buckets[bucket].items)
    names.insert(all_.parameters[piece.item].name);
  Communication found{from.method, from.ranks, from.numbers, {}};
  for (const auto& [rank, values] : from.of_ranks) {
    auto& here = found.of_ranks.emplace_back(rank, NamedState{}).second;
    for (const auto& one : values) {
      if (names.contains(part_named(one.first).parameter)) here.push_back(one);
    }
  }
  return found;
}

Communication StateOfExchange::whole(bool keep) const {
  if (!remembers()) return {};
  const at::NoGradGuard no_grad;
  Together together(all_.group, all_.device());
  Communication own, whole;
  together.here([&] {
    own = this->own();
    whole = {own.method, own.ranks, own.numbers, {}};
    for (int rank = 0; rank < all_.group->getSize(); ++rank) whole.of_ranks.emplace_back(rank, NamedState{});
  });
  for (std::size_t bucket = 0; bucket < all_.layout.buckets.size(); ++bucket) {
    const std::vector<IValue> of_ranks =
        together.gather([&] { return packed_communication(in_bucket(own, bucket)); });
    together.here([&] {
      for (std::size_t rank = 0; rank < of_ranks.size() && keep; ++rank) {
        Communication of_rank = unpacked_communication(of_ranks[rank]);
        for (auto& one : of_rank.of_ranks.front().second)
          whole.of_ranks[rank].second.push_back(std::move(one));
      }
    });
  }
  together.agree();
  return keep ? whole : Communication{};
}

// A parameter, whatever brackets there are in its name, or a part of one.
PieceName StateOfExchange::part_named(const std::string& name) const {
  return names_.contains(name) ? PieceName{name} : parse_piece_name(name);
}

// Throws ConfigError unless they are of one run, and of each of its ranks once.
Communication StateOfExchange::merged(const std::vector<Communication>& given) const {
  Communication all;
  bool first = true;
  for (const Communication& one : given) {
    if (!std::exchange(first, false) && (one.method != all.method || one.ranks != all.ranks ||
                                         text_of_numbers(one.numbers) != text_of_numbers(all.numbers))) {
      throw ConfigError("the states that are loaded are of several runs: one is of " +
                        compression(all.method) + " on " + std::to_string(all.ranks) + " ranks with " +
                        text_of_numbers(all.numbers) + ", another of " + compression(one.method) + " on " +
                        std::to_string(one.ranks) + " with " + text_of_numbers(one.numbers) +
                        "; give those of one checkpoint");
    }
    all.method = one.method;
    all.ranks = one.ranks;
    all.numbers = one.numbers;
    all.of_ranks.insert(all.of_ranks.end(), one.of_ranks.begin(), one.of_ranks.end());
  }
  if (all.method.empty()) return {};
  std::vector<int> times(static_cast<std::size_t>(std::max<std::int64_t>(all.ranks, 0)), 0);
  for (const auto& [rank, values] : all.of_ranks) {
    if (rank >= 0 && rank < all.ranks) ++times[static_cast<std::size_t>(rank)];
  }
  for (std::size_t rank = 0; rank < times.size(); ++rank) {
    if (times[rank] == 1) continue;
    throw ConfigError("what rank " + std::to_string(rank) + " of " + std::to_string(all.ranks) +
                      " has held back of gradients " +
                      (times[rank] == 0 ? "is in none of the states that are loaded"
                                        : "is given twice in the states that are loaded") +
                      "; give the state of each rank once");
  }
  check_known(all);
  return all;
}

void StateOfExchange::check_known(const Communication& given) const {
  const std::string here = remembers() ? declared().method() : "";
  if (given.method != here) {
    throw ConfigError(
        "the state that is loaded holds gradients back, by " + compression(given.method) +
        ", and gradients are exchanged here by " + compression(here) +
        ": give the same, or take what is held back (`communication`) out of the state to go on "
        "without it");
  }
  for (const auto& [name, number] : given.numbers) {
    const auto& known = declared().numbers();
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw ConfigError("the state that is loaded has a number " + name + ", which " + compression(here) +
                        " has not; give a state of the same version");
  }
  for (const auto& [rank, values] : given.of_ranks) {
    for (const auto& [name, of_name] : values) {
      const PieceName piece = part_named(name);
      const auto known =
          std::find_if(all_.parameters.begin(), all_.parameters.end(),
                       [&](const ReducedParameter& one) { return one.name == piece.parameter; });
      if (known == all_.parameters.end()) {
        throw ConfigError("the state that is loaded holds back gradients of " + name +
                          ", which the module has not or does not train; build it as it was");
      }
      const std::int64_t elements = known->tensor.numel();
      const bool whole = piece.last < 0;
      const std::int64_t last = whole ? elements : piece.last;
      const bool lies_in_it = piece.first >= 0 && piece.first <= last && last <= elements;
      for (const auto& [key, value] : of_name) {
        const auto& tensors = declared().tensors();
        const auto declares = [&, key = key](const RememberedTensor& what) { return what.name == key; };
        const auto declared_as = std::find_if(tensors.begin(), tensors.end(), declares);
        if (declared_as == tensors.end()) {
          throw ConfigError("the state that is loaded has " + key + " of " + name + ", which " +
                            compression(here) + " does not keep; give a state of the same version");
        }
        if (declared_as->extent == RememberedTensor::Extent::kFactor) {
          check_factor(piece, *declared_as, value, known->tensor);
          continue;
        }
        const bool fits =
            lies_in_it && value.isTensor() && value.toTensor().numel() == last - piece.first &&
            (value.toTensor().dim() == 1 || (whole && value.toTensor().sizes() == known->tensor.sizes()));
        if (fits) continue;
        throw ConfigError(key + " of " + name + " in the state that is loaded is not of elements " +
                          std::to_string(piece.first) + " to " + std::to_string(last) + " of " +
                          std::to_string(elements) +
                          ", or has another shape; give a checkpoint of the same model");
      }
    }
  }
}

void StateOfExchange::check_factor(const PieceName& piece, const RememberedTensor& what, const IValue& value,
                                   const Tensor& parameter) const {
  const std::vector<std::int64_t> shape = what.shape_of(parameter.sizes());
  if (piece.last < 0 && !shape.empty() && value.isTensor() && value.toTensor().sizes() == shape &&
      value.toTensor().scalar_type() == at::kFloat)
    return;
  throw ConfigError(what.name + " of " + piece.parameter +
                    " in the state that is loaded is not of the shape that this compression gives it; give a "
                    "checkpoint of the same model, and the options that it had");
}

std::vector<RememberedPiece> StateOfExchange::pieces_of(const Communication& given,
                                                        const RememberedTensor& what,
                                                        std::size_t item) const {
  const auto& [parameter, tensor] = all_.parameters[item];
  const at::ScalarType dtype = exchanged_.dtype_of_sums(item);
  std::vector<RememberedPiece> found;
  for (const auto& [rank, values] : given.of_ranks) {
    for (const auto& [name, of_name] : values) {
      const PieceName piece = part_named(name);
      if (piece.parameter != parameter) continue;
      for (const auto& [key, value] : of_name) {
        if (key != what.name) continue;
        const Tensor flat = in_memory_order({name, tensor}, value.toTensor());
        found.push_back({rank, piece.first, piece.last < 0 ? tensor.numel() : piece.last,
                         exactly(key + " of " + name, flat, dtype)});
      }
    }
  }
  return found;
}

// What the first rank has that has one.
Tensor StateOfExchange::factor_of(const Communication& given, const std::string& what,
                                  const std::string& parameter) const {
  for (const auto& [rank, values] : given.of_ranks) {
    for (const auto& [name, of_name] : values) {
      if (name != parameter) continue;
      for (const auto& [key, value] : of_name) {
        if (key == what) return value.toTensor();
      }
    }
  }
  return {};
}

void StateOfExchange::add_own(Communication& own, const Communication& given, std::size_t bucket) const {
  for (const RememberedTensor& what : declared().tensors()) {
    for (const ShardPiece& piece : pieces(bucket, what.extent)) {
      if (what.extent == RememberedTensor::Extent::kFactor) {
        const std::string& parameter = all_.parameters[piece.item].name;
        if (Tensor factor = factor_of(given, what.name, parameter); factor.defined())
          values_of(own.of_ranks.front().second, parameter).emplace_back(what.name, std::move(factor));
        continue;
      }
      const std::string subject = what.name + " of " + all_.parameters[piece.item].name;
      std::vector<RememberedPiece> had = pieces_of(given, what, piece.item);
      const RememberedRange range{piece.first, piece.first + piece.elements};
      const Tensor value =
          what.ranks == RememberedTensor::Ranks::kAlike
              ? alike_of(subject, std::move(had), range)
              : share_of(subject, std::move(had), range, holder(what.extent), holders(what.extent));
      if (!value.defined()) continue;
      values_of(own.of_ranks.front().second, name(piece, what.extent)).emplace_back(what.name, value);
    }
  }
}

Communication StateOfExchange::resharded(const std::vector<Communication>& given) const {
  const at::NoGradGuard no_grad;
  Together together(all_.group, all_.device());
  const std::vector<std::int64_t> many = together.tell(static_cast<std::int64_t>(given.size()));
  const bool from_first = std::find(many.begin(), many.end(), 0) != many.end();
  const bool gives = !from_first || all_.group->getRank() == 0;
  Communication all;
  together.here([&] {
    if (gives) all = merged(given);
  });
  if (from_first) {
    const IValue head = together.broadcast([&] {
      return packed_communication({all.method, all.ranks, all.numbers, {}});
    });
    together.here([&] {
      if (!gives) all = unpacked_communication(head);
    });
  }
  together.agree();
  if (all.method.empty()) return {};
  Communication own{all.method, all_.group->getSize(), all.numbers, {}};
  own.of_ranks.emplace_back(all_.group->getRank(), NamedState{});
  for (std::size_t bucket = 0; bucket < all_.layout.buckets.size(); ++bucket) {
    if (!from_first) {
      together.here([&] { add_own(own, in_bucket(all, bucket), bucket); });
      continue;
    }
    const IValue sent = together.broadcast([&] { return packed_communication(in_bucket(all, bucket)); });
    together.here([&] { add_own(own, unpacked_communication(sent), bucket); });
  }
  together.agree();
  return own;
}

}  // namespace reef
