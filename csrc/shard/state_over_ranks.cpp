#include "shard/state_over_ranks.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>

#include "reef/error.h"
#include "shard/together.h"

namespace reef {
namespace {

using at::Tensor;
using c10::IValue;

IValue tuple(std::vector<IValue> values) { return c10::ivalue::Tuple::create(std::move(values)); }

// As it is kept, but on the CPU and without the rest of the memory that it may be a view of.
IValue compact(const IValue& value) {
  if (!value.isTensor()) return value;
  Tensor tensor = value.toTensor().detach().cpu();
  if (tensor.storage().nbytes() != tensor.nbytes()) tensor = tensor.clone();
  return tensor;
}

// Pairs, as a tuple of tuples.
template <class Value, class Pack>
IValue packed(const std::vector<std::pair<std::string, Value>>& pairs, const Pack& pack) {
  std::vector<IValue> all;
  for (const auto& [key, value] : pairs) all.push_back(tuple({key, pack(value)}));
  return tuple(std::move(all));
}

template <class Unpack>
auto unpacked(const IValue& pairs, const Unpack& unpack) {
  std::vector<std::pair<std::string, std::decay_t<decltype(unpack(pairs))>>> all;
  for (const IValue& one : pairs.toTupleRef().elements()) {
    const auto& pair = one.toTupleRef().elements();
    all.emplace_back(pair[0].toStringRef(), unpack(pair[1]));
  }
  return all;
}

// Pieces by the name of their parameter.
using Pieces = std::map<std::string, std::vector<StatePiece>, std::less<>>;

void add(Pieces& pieces, const DividedParameters& all, const NamedState& state) {
  std::map<std::string, Tensor, std::less<>> parameters;
  for (const ReducedParameter& one : all.parameters) parameters.emplace(one.name, one.tensor);
  for (const auto& [name, values] : state) {
    const bool whole = parameters.count(name) > 0;  // whatever brackets there are in it
    PieceName piece = whole ? PieceName{name} : parse_piece_name(name);
    const auto known = parameters.find(piece.parameter);
    if (known == parameters.end()) continue;
    const std::int64_t elements = known->second.numel();
    if (piece.last < 0) piece.last = elements;
    if (piece.first == piece.last && elements > 0) continue;  // others keep it
    if (piece.first > piece.last || piece.last > elements) {
      throw ConfigError(name + " reaches beyond the " + std::to_string(elements) +
                        " elements of the parameter; give a checkpoint of the same model");
    }
    const StatePiece found{piece.first, piece.last, &values};
    if (all.divided) check_by_element({piece.parameter, known->second}, found);
    pieces[piece.parameter].push_back(found);
  }
}

StateSubject subject_of(const DividedParameters& all, std::size_t item) {
  return {all.parameters[item].name, all.parameters[item].tensor};
}

// What is in the bucket, of a state, for others.
NamedState in_bucket(const DividedParameters& all, const NamedState& state, std::size_t bucket) {
  NamedState found;
  if (all.divided && all.layout.place_of(all.group->getRank()).copy > 0)
    return found;  // the first copy speaks for all
  for (const KeptElements& kept : all.kept(bucket)) {
    const auto own =
        std::find_if(state.begin(), state.end(), [&](const auto& one) { return one.first == kept.name; });
    if (own != state.end()) found.push_back(*own);
  }
  return found;
}

// Of all that is in the bucket.
NamedState whole_of(const DividedParameters& all, const Pieces& pieces, std::size_t bucket) {
  NamedState whole;
  for (const ShardPiece& place : all.layout.buckets[bucket].items) {
    const StateSubject subject = subject_of(all, place.item);
    const auto found = pieces.find(subject.name);
    if (found == pieces.end()) continue;
    whole.emplace_back(subject.name, whole_values(subject, found->second));
  }
  return whole;
}

void add_own(NamedState& own, const DividedParameters& all, const Pieces& pieces, std::size_t bucket) {
  for (const KeptElements& kept : all.kept(bucket)) {
    const StateSubject subject = subject_of(all, kept.item);
    const auto found = pieces.find(subject.name);
    if (found == pieces.end()) continue;
    own.emplace_back(kept.name, all.divided ? kept_values(subject, kept.first, kept.last, found->second)
                                            : whole_values(subject, found->second));
  }
}

}  // namespace

IValue packed_state(const NamedState& state) {
  return packed(state, [](const StateValues& values) { return packed(values, compact); });
}

NamedState unpacked_state(const IValue& state) {
  return unpacked(state, [](const IValue& values) {
    return unpacked(values, [](const IValue& value) { return value; });
  });
}

c10::Device DividedParameters::device() const { return device_of(parameters, &ReducedParameter::tensor); }

std::vector<KeptElements> DividedParameters::kept(std::size_t bucket) const {
  std::vector<KeptElements> kept;
  if (!divided) {
    for (const ShardPiece& piece : layout.buckets[bucket].items)
      kept.push_back({piece.item, 0, parameters[piece.item].tensor.numel(), parameters[piece.item].name});
    return kept;
  }
  for (const ShardPiece& piece : layout.parts(bucket, layout.place_of(group->getRank()).slice)) {
    const auto& [name, tensor] = parameters[piece.item];
    if (piece.elements == 0 && tensor.numel() > 0) continue;
    const std::int64_t last = piece.first + piece.elements;
    kept.push_back({piece.item, piece.first, last, piece_name(name, piece.first, last)});
  }
  return kept;
}

void agree(const DividedParameters& all, const std::function<void()>& work) {
  Together together(all.group, all.device());
  together.here(work);
  together.agree();
}

NamedState whole_state(const DividedParameters& all, const NamedState& own, bool keep) {
  const at::NoGradGuard no_grad;
  Together together(all.group, all.device());
  NamedState whole;
  for (std::size_t bucket = 0; bucket < all.layout.buckets.size(); ++bucket) {
    const auto in_this = [&] { return packed_state(in_bucket(all, own, bucket)); };
    std::vector<IValue> of_ranks;
    if (all.divided) {
      of_ranks = together.gather(in_this);
    } else {
      together.here([&] { of_ranks.push_back(in_this()); });
    }
    together.here([&] {
      if (!keep) return;
      std::vector<NamedState> states;
      for (const IValue& state : of_ranks) states.push_back(unpacked_state(state));
      Pieces pieces;
      for (const NamedState& state : states) add(pieces, all, state);
      for (auto& one : whole_of(all, pieces, bucket)) whole.push_back(std::move(one));
    });
  }
  together.agree();
  std::map<std::string, std::size_t, std::less<>> item;
  for (std::size_t i = 0; i < all.parameters.size(); ++i) item.emplace(all.parameters[i].name, i);
  std::stable_sort(whole.begin(), whole.end(), [&](const auto& a, const auto& b) {
    return item.find(a.first)->second > item.find(b.first)->second;
  });
  return whole;
}

NamedState own_state(const DividedParameters& all, const std::vector<NamedState>& given,
                     NamedState& undivided) {
  const at::NoGradGuard no_grad;
  Together together(all.group, all.device());
  const std::vector<std::int64_t> many = together.tell(static_cast<std::int64_t>(given.size()));
  const bool from_first = std::find(many.begin(), many.end(), 0) != many.end();
  if (from_first && many.front() == 0)
    throw ConfigError(
        "rank 0 was given no state to load, and another rank neither: give it to rank 0, or to all ranks");
  Pieces pieces;
  together.here([&] {
    for (const NamedState& state : given) add(pieces, all, state);
  });
  NamedState own;
  for (std::size_t bucket = 0; bucket < all.layout.buckets.size(); ++bucket) {
    if (!from_first) {
      together.here([&] { add_own(own, all, pieces, bucket); });
      continue;
    }
    const IValue sent = together.broadcast([&] { return packed_state(whole_of(all, pieces, bucket)); });
    together.here([&] {
      const NamedState whole = unpacked_state(sent);
      Pieces of_first;
      add(of_first, all, whole);
      add_own(own, all, of_first, bucket);
    });
  }
  if (from_first) {
    const IValue sent = together.broadcast([&] { return packed_state(undivided); });
    together.here([&] { undivided = unpacked_state(sent); });
  }
  together.agree();
  return own;
}

}  // namespace reef
