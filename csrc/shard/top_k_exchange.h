#pragma once

#include <utility>
#include <vector>

#include "shard/sparse_exchange.h"

namespace reef {

/// Top-k with error feedback (Aji and Heafield 2017; Stich et al. 2018): every rank's entries go to all, and
/// are added up in the order of ranks. All that a rank takes out of its gradient is applied. A rank sends 8 k
/// (P - 1) bytes.
class TopKExchange : public SparseExchange {
 public:
  TopKExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options,
               const char* method = "topk", std::vector<RememberedTensor> more = {})
      : SparseExchange(group, number, slices, options, method, std::move(more)) {}

 private:
  SparseGradient sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                     const Residual&) final {
    return sum_of(gather("the exchange of the largest elements", own, k, among));
  }
};

}  // namespace reef
