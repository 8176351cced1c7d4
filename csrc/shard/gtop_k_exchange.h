#pragma once

#include "shard/sparse_exchange.h"

namespace reef {

/// The k largest sums of all ranks' k largest elements: gTop-k (1901.04359, section IV), by a butterfly of
/// merges in place of a tree and a broadcast, which halves the time, and without its loss. In round r a rank
/// exchanges what it has with the one 2^r places away, and both merge the two: all ranks of a group of
/// 2^(r+1) have the same, bit for bit, and drop the same partial sums. Each rank holds back again what it
/// took of elements that are not in the result. Of those that are, exactly one rank of a group, by the index,
/// holds back each partial sum that was dropped. So what is applied and what is held back is all that there
/// was.
///
/// Any number of ranks: those beyond the largest power of two give what they have to one within it first, and
/// are given the result last. A rank sends 8 k log2(P) bytes; where P is no power of two, 8 k beyond it, 8 k
/// more on those that take part for another.
class GTopKExchange final : public SparseExchange {
 public:
  GTopKExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
      : SparseExchange(group, number, slices, options, "gtopk") {}

 private:
  SparseGradient sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                     const Residual& residual) override;
};

}  // namespace reef
