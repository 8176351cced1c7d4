#pragma once

#include <vector>

#include "kernels/top_k.h"

namespace reef {

/// A vector that is zero but for these, in the order of their indices.
using SparseGradient = std::vector<kernels::SparseEntry>;

/// The `k` largest sums of the two, equal indices added up, and what they leave: sums, too.
struct MergedSparse {
  SparseGradient kept, dropped;
};
/// Alike for (a, b) and (b, a), bit for bit: what is NaN is one and the same NaN.
MergedSparse merge_largest(const SparseGradient& a, const SparseGradient& b, std::size_t k);

/// Those of `a` whose indices `b` does not have.
SparseGradient without(const SparseGradient& a, const SparseGradient& b);

/// Those of `a` whose indices `b` has, too.
SparseGradient common(const SparseGradient& a, const SparseGradient& b);

/// All sums of these, added up in their order.
SparseGradient sum_of(const std::vector<SparseGradient>& all);

}  // namespace reef
