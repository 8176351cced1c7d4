#include "shard/state_of_exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>

#include "reef/ledger.h"
#include "shard/shard_parts.h"

namespace reef {
namespace {

using at::Tensor;
using Communication = OptimizerState::Communication;
using Extent = RememberedTensor::Extent;

}  // namespace

StateOfExchange::StateOfExchange(const DividedParameters& all, ExchangedParameters& exchanged)
    : all_(all), exchanged_(exchanged) {
  for (const ReducedParameter& one : all.parameters) names_.insert(one.name);
}

OptimizerState::Values& StateOfExchange::values_of(NamedState& state, const std::string& name) {
  auto found = std::find_if(state.begin(), state.end(), [&](const auto& one) { return one.first == name; });
  if (found == state.end()) found = state.insert(found, {name, {}});
  return found->second;
}

std::vector<ShardPiece> StateOfExchange::pieces(std::size_t bucket, Extent extent) const {
  std::vector<ShardPiece> found;
  const int slice = all_.group->getRank() % all_.layout.ranks;
  const ShardBucket& of = all_.layout.buckets[bucket];
  for (ShardPiece piece : extent != Extent::kSlice ? of.items : all_.layout.pieces(bucket, slice)) {
    if (extent == Extent::kSlice) piece.offset -= slice * of.slice_elements;
    if (piece.elements > 0) found.push_back(piece);
  }
  return found;
}

int StateOfExchange::holder(Extent extent) const {
  return all_.group->getRank() / (extent != Extent::kSlice ? 1 : all_.layout.ranks);
}
int StateOfExchange::holders(Extent extent) const {
  return all_.group->getSize() / (extent != Extent::kSlice ? 1 : all_.layout.ranks);
}

std::string StateOfExchange::name(const ShardPiece& piece, Extent extent) const {
  const std::string& parameter = all_.parameters[piece.item].name;
  return extent != Extent::kSlice ? parameter
                                  : piece_name(parameter, piece.first, piece.first + piece.elements);
}

Communication StateOfExchange::own() const {
  if (!remembers()) return {};
  Communication found{declared().method(), all_.group->getSize(), {}, {}};
  for (const std::string& number : declared().numbers())
    found.numbers.emplace_back(number, declared().number(number));
  auto& values = found.of_ranks.emplace_back(all_.group->getRank(), NamedState{}).second;
  for (std::size_t bucket = 0; bucket < all_.layout.buckets.size(); ++bucket) {
    for (const RememberedTensor& what : declared().tensors()) {
      const bool others_say = what.ranks == RememberedTensor::Ranks::kAlike && holder(what.extent) > 0;
      if (what.extent == Extent::kFactor) {
        if (!others_say) add_factors(values, bucket, what);
        continue;
      }
      const Tensor all = exchanged_.exchange_of(bucket).memory().tensor(bucket, what.name);
      if (others_say || !all.defined()) continue;
      for (const ShardPiece& piece : pieces(bucket, what.extent)) {
        const Tensor value = what.extent == Extent::kBucket
                                 ? alias(all, piece.offset, exchanged_.flat_place_of(piece.item).shape,
                                         exchanged_.flat_place_of(piece.item).strides)
                                 : alias(all, piece.offset, piece.elements);
        const std::string key = name(piece, what.extent);
        values_of(values, key).emplace_back(what.name, value);
      }
    }
  }
  return found;
}

void StateOfExchange::add_factors(NamedState& values, std::size_t bucket,
                                  const RememberedTensor& what) const {
  for (const ShardPiece& piece : pieces(bucket, what.extent)) {
    const Tensor factor = exchanged_.exchange_of(bucket).memory().tensor(bucket, what.name, piece.offset);
    if (factor.defined()) values_of(values, name(piece, what.extent)).emplace_back(what.name, factor);
  }
}

void StateOfExchange::load(const Communication& own) {
  if (!remembers()) return;
  const at::NoGradGuard no_grad;
  const CategoryScope communication(Category::kCommunication);
  std::map<std::string, const OptimizerState::Values*> by_name;
  for (const auto& [rank, values] : own.of_ranks) {
    for (const auto& [name, of_name] : values) by_name.emplace(name, &of_name);
  }
  std::map<std::pair<std::size_t, std::string>, Tensor> found;
  std::map<std::tuple<std::size_t, std::string, std::int64_t>, Tensor> factors;
  for (std::size_t bucket = 0; bucket < all_.layout.buckets.size(); ++bucket) {
    for (const RememberedTensor& what : declared().tensors()) {
      for (const ShardPiece& piece : pieces(bucket, what.extent)) {
        const auto at = by_name.find(name(piece, what.extent));
        if (at == by_name.end()) continue;
        for (const auto& [key, value] : *at->second) {
          if (key != what.name) continue;
          if (what.extent == Extent::kFactor) {
            factors[{bucket, key, piece.offset}] = value.toTensor().contiguous();
            continue;
          }
          const Tensor& like = all_.parameters[piece.item].tensor;
          const Tensor flat = in_memory_order({name(piece, what.extent), like}, value.toTensor());
          Tensor& all = found[{bucket, what.name}];
          if (!all.defined()) {
            const std::int64_t elements = what.extent == Extent::kBucket
                                              ? all_.layout.elements(bucket)
                                              : all_.layout.buckets[bucket].slice_elements;
            all = at::zeros({elements}, flat.options().device(like.device()));
          }
          alias(all, piece.offset, piece.elements).copy_(flat);
        }
      }
    }
  }
  for (std::size_t bucket = 0; bucket < all_.layout.buckets.size(); ++bucket)
    exchanged_.exchange_of(bucket).memory().clear();
  for (auto& [place, tensor] : found)
    exchanged_.exchange_of(place.first).memory().remember(place.first, place.second, std::move(tensor));
  for (auto& [place, factor] : factors) {
    const auto& [bucket, name, first] = place;
    exchanged_.exchange_of(bucket).memory().remember(bucket, name, std::move(factor), first);
  }
  for (std::size_t bucket = 0; bucket < all_.layout.buckets.size(); ++bucket) {
    ExchangeMemory& memory = exchanged_.exchange_of(bucket).memory();
    for (const auto& [name, number] : own.numbers) memory.remember(name, number.toInt());
    memory.keep_step();
  }
}

OptimizerState::Communication Shard::communication() const {
  return StateOfExchange(parts_->divided, *parts_->reducer).own();
}

void Shard::load_communication(const OptimizerState::Communication& own) {
  StateOfExchange(parts_->divided, *parts_->reducer).load(own);
}

}  // namespace reef
