#include "shard/state_over_ranks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "page/pinned.h"
#include "reef/error.h"

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

IValue packed_state(const NamedState& state) {
  return packed(state, [](const StateValues& values) { return packed(values, compact); });
}

NamedState unpacked_state(const IValue& state) {
  return unpacked(state, [](const IValue& values) {
    return unpacked(values, [](const IValue& value) { return value; });
  });
}

// A budget must not move what is read and written here without an operator.
void pin_tensors(const IValue& value, std::vector<std::unique_ptr<Pinned>>& pins) {
  if (value.isTensor() && value.toTensor().defined()) {
    pins.push_back(std::make_unique<Pinned>(value.toTensor()));
  } else if (value.isTuple()) {
    for (const IValue& one : value.toTupleRef().elements()) pin_tensors(one, pins);
  }
}

Tensor bytes_of(const IValue& value) {
  std::vector<std::unique_ptr<Pinned>> pins;
  pin_tensors(value, pins);
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  const Tensor all = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(all.mutable_data_ptr(), bytes.data(), bytes.size());
  return all;
}

IValue value_of(const Tensor& bytes) {
  const Pinned pinned(bytes);
  const auto* const begin = static_cast<const char*>(bytes.const_data_ptr());
  return torch::jit::pickle_load(std::vector<char>(begin, begin + bytes.numel()));
}

// Pieces by the name of their parameter.
using Pieces = std::map<std::string, std::vector<StatePiece>, std::less<>>;

void add(Pieces& pieces, const DividedParameters& all, const NamedState& state) {
  std::map<std::string, std::int64_t, std::less<>> elements;
  for (const ReducedParameter& one : all.parameters) elements.emplace(one.name, one.tensor.numel());
  for (const auto& [name, values] : state) {
    PieceName piece = parse_piece_name(name);
    if (const auto whole = elements.find(name); whole != elements.end())
      piece = {name, 0, whole->second};  // whatever brackets there are in it
    const auto known = elements.find(piece.parameter);
    if (known == elements.end()) continue;
    if (piece.last < 0) piece.last = known->second;
    if (piece.last > known->second) {
      throw ConfigError(name + " reaches beyond the " + std::to_string(known->second) +
                        " elements of the parameter; give a checkpoint of the same model");
    }
    pieces[piece.parameter].push_back({piece.first, piece.last, &values});
  }
}

StateSubject subject_of(const DividedParameters& all, std::size_t item) {
  return {all.parameters[item].name, all.parameters[item].tensor};
}

struct Kept {
  std::size_t item;
  std::int64_t first;
  std::int64_t last;
};

// By this rank, of a bucket.
std::vector<Kept> kept_of(const DividedParameters& all, std::size_t bucket) {
  std::vector<Kept> kept;
  if (!all.divided) {
    for (const ShardPiece& piece : all.layout.buckets[bucket].items)
      kept.push_back({piece.item, 0, all.parameters[piece.item].tensor.numel()});
    return kept;
  }
  for (const ShardPiece& piece : all.layout.pieces(bucket, all.group->getRank() % all.layout.ranks))
    kept.push_back({piece.item, piece.first, piece.first + piece.elements});
  return kept;
}

std::string name_of(const DividedParameters& all, const Kept& kept) {
  const std::string& name = all.parameters[kept.item].name;
  return all.divided ? piece_name(name, kept.first, kept.last) : name;
}

// What is in the bucket, of a state, for others.
NamedState in_bucket(const DividedParameters& all, const NamedState& state, std::size_t bucket) {
  NamedState found;
  if (all.divided && all.group->getRank() >= all.layout.ranks) return found;  // the first copy speaks for all
  for (const Kept& kept : kept_of(all, bucket)) {
    const std::string name = name_of(all, kept);
    const auto own =
        std::find_if(state.begin(), state.end(), [&](const auto& one) { return one.first == name; });
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
  for (const Kept& kept : kept_of(all, bucket)) {
    const StateSubject subject = subject_of(all, kept.item);
    const auto found = pieces.find(subject.name);
    if (found == pieces.end()) continue;
    own.emplace_back(name_of(all, kept), all.divided
                                             ? part_values(subject, kept.first, kept.last, found->second)
                                             : whole_values(subject, found->second));
  }
}

}  // namespace

c10::Device DividedParameters::device() const { return device_of(parameters, &ReducedParameter::tensor); }

std::vector<IValue> gather_values(const DividedParameters& all, const IValue& own) {
  std::vector<IValue> found;
  for (const Tensor& bytes : gather_bytes(bytes_of(own), all.group, all.device()))
    found.push_back(value_of(bytes));
  return found;
}

IValue broadcast_value(const DividedParameters& all, const IValue& of_first) {
  const bool first = all.group->getRank() == 0;
  return value_of(broadcast_bytes(first ? bytes_of(of_first) : Tensor(), all.group, all.device()));
}

void agree(const DividedParameters& all, const std::function<void()>& work) {
  std::exception_ptr own;
  std::string said;
  try {
    work();
  } catch (const std::exception& error) {
    own = std::current_exception();
    said = message_of(error);
  }
  const std::vector<IValue> of_ranks = gather_values(all, IValue(said));
  if (own) std::rethrow_exception(own);
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    if (!of_ranks[rank].toStringRef().empty())
      throw ConfigError("rank " + std::to_string(rank) + ": " + of_ranks[rank].toStringRef());
  }
}

NamedState whole_state(const DividedParameters& all, const NamedState& own, bool keep) {
  const at::NoGradGuard no_grad;
  NamedState whole;
  for (std::size_t bucket = 0; bucket < all.layout.buckets.size(); ++bucket) {
    std::vector<NamedState> of_ranks;
    if (all.divided) {
      for (const IValue& state : gather_values(all, packed_state(in_bucket(all, own, bucket))))
        of_ranks.push_back(unpacked_state(state));
    } else {
      of_ranks.push_back(unpacked_state(packed_state(in_bucket(all, own, bucket))));
    }
    Pieces pieces;
    for (const NamedState& state : of_ranks) add(pieces, all, state);
    NamedState of_bucket = whole_of(all, pieces, bucket);  // on all ranks: what is missing is thrown on all
    if (!keep) continue;
    for (auto& one : of_bucket) whole.push_back(std::move(one));
  }
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
  const std::vector<IValue> many = gather_values(all, IValue(static_cast<std::int64_t>(given.size())));
  const bool from_first =
      std::any_of(many.begin(), many.end(), [](const IValue& n) { return n.toInt() == 0; });
  if (from_first && many.front().toInt() == 0)
    throw ConfigError(
        "rank 0 was given no state to load, and another rank neither: give it to rank 0, or to all ranks");
  Pieces pieces;
  agree(all, [&] {
    for (const NamedState& state : given) add(pieces, all, state);
  });
  NamedState own;
  if (!from_first) {
    agree(all, [&] {
      for (std::size_t bucket = 0; bucket < all.layout.buckets.size(); ++bucket)
        add_own(own, all, pieces, bucket);
    });
    return own;
  }
  for (std::size_t bucket = 0; bucket < all.layout.buckets.size(); ++bucket) {
    NamedState whole;
    agree(all, [&] {
      if (all.group->getRank() == 0) whole = whole_of(all, pieces, bucket);
    });
    whole = unpacked_state(broadcast_value(all, packed_state(whole)));
    Pieces of_first;
    add(of_first, all, whole);
    add_own(own, all, of_first, bucket);
  }
  undivided = unpacked_state(broadcast_value(all, packed_state(undivided)));
  return own;
}

}  // namespace reef
