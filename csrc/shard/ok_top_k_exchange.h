#pragma once

#include <vector>

#include "shard/sparse_exchange.h"

namespace reef {

/// The k largest sums of all ranks' k largest elements, exactly, by owners of regions (Ok-Topk, Li and
/// Hoefler, 2201.07598, section 3). Each rank owns a region of the indices: ranks propose boundaries between
/// which they have as many entries each, and the mean of these is taken. Entries go to the owners of their
/// regions, which add them up in the order of ranks; owners find out which of their sums may be among the k
/// largest, divide those evenly among the ranks, and all gather them. A rank holds back again what it has
/// taken out of elements that are not in the result: of those that are, every rank's value has reached the
/// owner, so nothing is lost.
///
/// The paper finds thresholds and boundaries anew each 32 and 64 steps, since finding them takes it long, and
/// lets the number of entries vary between 2 k / 3 and 5 k / 4 meanwhile. Here both are of each step: the
/// largest elements are found in one pass as it is, so a rank has k entries, the result has k, and there is
/// nothing to remember. An owner tells every s-th largest of its sums, s being k / (4 P), from which all
/// ranks know a sum that is not above the k-th: less than 5 k / 4 + s + 1 sums are gathered.
///
/// Entries are 8 bytes. Where all ranks' entries lie alike, a rank sends 8 k (P - 1) / P bytes to owners, 10
/// k (P - 1) / P to gather, and in the mean 10 k (P - 1) / P^2 to even out: less than the 6 k (P - 1) / P
/// words of the paper. Boundaries, counts and what is told are (36 P + 4) (P - 1) bytes at most beside them.
/// They take seven rounds, so this is for many ranks on links of low latency.
class OkTopKExchange final : public SparseExchange {
 public:
  OkTopKExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
      : SparseExchange(group, number, slices, options, "oktopk") {}

 private:
  SparseGradient sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                     const Residual& residual) override;
  /// Adds up what all ranks have in this rank's region.
  SparseGradient sums_of_region(const SparseGradient& own, const RanksAmong& among);
  /// Gives those sums of this rank's region that may be among the `k` largest of all.
  SparseGradient candidates(SparseGradient sums, std::size_t k, const RanksAmong& among);
  /// Gathers the entries of all ranks, one region after another, such that each rank sends equally many.
  SparseGradient gathered_evenly(const SparseGradient& own, const RanksAmong& among);
  /// All-gathers equally many numbers of each rank, in the order of ranks.
  std::vector<std::uint32_t> told(const char* name, const std::vector<std::uint32_t>& own,
                                  const RanksAmong& among);
};

}  // namespace reef
