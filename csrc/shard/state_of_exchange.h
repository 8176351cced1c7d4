#pragma once

#include <set>
#include <string>
#include <vector>

#include "reef/optimizer_state.h"
#include "shard/remembered_pieces.h"
#include "shard/state_over_ranks.h"

namespace reef {

/// What the exchanges of parameters' gradients remember, as data by the names of these: for state dicts, and
/// for other ranks, buckets and stages. See ExchangeMemory.
class StateOfExchange {
 public:
  using Communication = OptimizerState::Communication;
  /// Both outlive it. While no pass is under way.
  StateOfExchange(const DividedParameters& all, ExchangedParameters& exchanged);

  /// Of this rank: in the memory of the exchange, which stays as it is.
  Communication own() const;
  /// In place of what is remembered. What it throws leaves that as it was.
  void load(const Communication& own);

  /// The following are collective, as those of state_over_ranks.h.

  /// Of all ranks, as copies on the CPU. Not `keep`: nothing, on a rank that only helps. Memory: what all
  /// ranks remember of a bucket, twice, beside what is returned.
  Communication whole(bool keep) const;
  /// Of what the ranks of a run remembered, in any number of lists that say so of each of them, what this
  /// rank is to load. If a rank gives no list, all are given what rank 0 has. Throws ConfigError for what
  /// another method remembers, and if something would be lost.
  Communication resharded(const std::vector<Communication>& given) const;

 private:
  const ExchangeMemory& declared() const { return exchanged_.exchange_of(0).memory(); }
  bool remembers() const { return !all_.layout.buckets.empty() && !declared().method().empty(); }
  void add_factors(NamedState& values, std::size_t bucket, const RememberedTensor& what) const;
  at::Tensor factor_of(const Communication& given, const std::string& what,
                       const std::string& parameter) const;
  void check_factor(const PieceName& piece, const RememberedTensor& what, const c10::IValue& value,
                    const at::Tensor& parameter) const;
  static OptimizerState::Values& values_of(NamedState& state, const std::string& name);
  /// Of what this rank has of a bucket, in the order of what it remembers.
  std::vector<ShardPiece> pieces(std::size_t bucket, RememberedTensor::Extent extent) const;
  /// Which of so many ranks that have the same elements this one is.
  int holder(RememberedTensor::Extent extent) const;
  int holders(RememberedTensor::Extent extent) const;
  std::string name(const ShardPiece& piece, RememberedTensor::Extent extent) const;
  PieceName part_named(const std::string& name) const;
  Communication merged(const std::vector<Communication>& given) const;
  void check_known(const Communication& given) const;
  Communication in_bucket(const Communication& from, std::size_t bucket) const;
  void add_own(Communication& own, const Communication& given, std::size_t bucket) const;
  std::vector<RememberedPiece> pieces_of(const Communication& given, const RememberedTensor& what,
                                         std::size_t item) const;

  const DividedParameters& all_;
  ExchangedParameters& exchanged_;
  std::set<std::string> names_;  ///< of parameters
};

}  // namespace reef
