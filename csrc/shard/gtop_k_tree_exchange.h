#pragma once

#include "shard/sparse_exchange.h"

namespace reef {

/// gTop-k as it was published (1901.04359, algorithm 1), to be compared with: merged up a binomial tree to
/// the first rank, which the result is broadcast from. A rank holds back again what it took out of elements
/// that are not in the result. That LOSES what an inner merge has dropped of an element which other ranks
/// keep: it is neither applied nor held back. The busiest rank sends 8 k ceil(log2(P)) bytes, in twice as
/// many rounds as GTopKExchange.
class GTopKTreeExchange final : public SparseExchange {
 public:
  GTopKTreeExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
      : SparseExchange(group, number, slices, options, "gtopk_tree") {}

 private:
  SparseGradient sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                     const Residual& residual) override;
};

}  // namespace reef
