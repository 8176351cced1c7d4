#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "reef/collectives.h"
#include "reef/shard_layout.h"
#include "shard/reducer.h"
#include "shard/state_pieces.h"

namespace reef {

/// Elements [first, last) of a parameter, under the name of that part of it or, not divided, its own.
struct KeptElements {
  std::size_t item;
  std::int64_t first;
  std::int64_t last;
  std::string name;
};

/// Parameters, and which rank keeps what of them.
struct DividedParameters {
  std::vector<ReducedParameter> parameters;  ///< items of the layout: the module's last first
  ShardLayout layout;
  bool divided = false;  ///< else every rank keeps all of them
  ProcessGroupPtr group;

  c10::Device device() const;
  /// What this rank keeps of a bucket; every rank keeps what has no elements.
  std::vector<KeptElements> kept(std::size_t bucket) const;
};

/// What is kept for parameters or parts, by their names.
using NamedState = std::vector<std::pair<std::string, StateValues>>;

/// As one value, for Together, with tensors as copies on the CPU; and what has been made of one.
c10::IValue packed_state(const NamedState& state);
NamedState unpacked_state(const c10::IValue& state);

/// All other functions here are collective: all ranks call them alike. What goes wrong on one is thrown on
/// all. They throw ConfigError and RankFailed. Sent by a rank: what it keeps, to each of the others, a
/// bucket's at a time; memory: what all ranks keep for a bucket, twice.

/// Of what each rank keeps, what one process would keep, in the module's order. Not `keep`: nothing, on a
/// rank that only helps.
NamedState whole_state(const DividedParameters& all, const NamedState& own, bool keep);

/// Of pieces that any number of ranks kept, in any number of lists, what this rank keeps. If a rank gives no
/// list, all are given what rank 0 has; `undivided`, too, which is what no parameter is divided for.
NamedState own_state(const DividedParameters& all, const std::vector<NamedState>& given,
                     NamedState& undivided);

/// Does it, and throws on all ranks if any has thrown (see Together).
void agree(const DividedParameters& all, const std::function<void()>& work);

}  // namespace reef
