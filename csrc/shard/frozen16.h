#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "reef/shard.h"
#include "shard/state_over_ranks.h"

namespace reef {

/// Parameters that are not trained, of a module that computes in 16 bits: it has the float32 ones rounded,
/// and the ranks keep what they were, divided as the stage divides parts. It is what states have; but a
/// parameter that the program writes is what was written.
class Frozen16 {
 public:
  Frozen16() = default;
  /// Rounds them; those that share memory share memory afterwards. `frozen`: the module's last first.
  Frozen16(const Shard::Named& frozen, const ShardOptions& options, const ProcessGroupPtr& group);

  /// Those that were rounded.
  const DividedParameters& divided() const { return divided_; }
  /// What this rank keeps, by name.
  NamedState own() const;
  /// What load() takes, of whole ones of all: all that may fail.
  struct Loaded {
    std::vector<at::Tensor> whole;  ///< of divided().parameters
    std::vector<at::Tensor> kept;
  };
  Loaded prepared(const NamedState& whole) const;
  void load(const Loaded& loaded);

 private:
  struct Kept {
    KeptElements place;
    at::Tensor exact;  ///< float32, in one dimension, in the order of memory
  };
  at::Tensor rounded(const Kept& kept) const;

  DividedParameters divided_;
  std::vector<Kept> kept_;
  at::ScalarType dtype_ = at::kBFloat16;  ///< of what is rounded
};

}  // namespace reef
