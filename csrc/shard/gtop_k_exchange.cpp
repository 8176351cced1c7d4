#include "shard/gtop_k_exchange.h"

#include <bit>
#include <vector>

namespace reef {
namespace {

constexpr const char* kLargestSums = "the exchange of the largest sums";

// Which of `group` ranks (a power of two) that have dropped the same partial sum holds it back, if its
// element is in the result. A hash: neighbours in a matrix spread, too.
std::uint32_t keeper(std::uint32_t index, std::uint32_t group) {
  return (index * 2654435761U >> 16U) & (group - 1);
}

}  // namespace

SparseGradient GTopKExchange::sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                                  const Residual& residual) {
  const int within = static_cast<int>(std::bit_floor(static_cast<unsigned>(among.count)));
  const int place = among.place;
  const bool beyond = place >= within;
  const bool for_another = !beyond && place + within < among.count;
  const auto rank_at = [&](bool is, int number) {
    return is ? std::optional(among.at(number)) : std::nullopt;
  };
  std::vector<SparseGradient> dropped;  // partial sums of which this rank is the keeper
  const auto merge = [&](const SparseGradient& a, const SparseGradient& b, int group) {
    MergedSparse merged = merge_largest(a, b, k);
    std::erase_if(merged.dropped, [&](const kernels::SparseEntry& each) {
      return keeper(each.index, static_cast<std::uint32_t>(group)) !=
             static_cast<std::uint32_t>(place % group);
    });
    dropped.push_back(std::move(merged.dropped));
    return std::move(merged.kept);
  };

  SparseGradient all = own;
  if (within < among.count) {
    const SparseGradient received =
        transfer(kLargestSums, own, k, rank_at(beyond, place - within), rank_at(for_another, place + within));
    if (for_another) all = merge(all, received, 1);
  }
  for (int distance = 1; distance < within; distance *= 2) {
    const auto partner = rank_at(!beyond, place ^ distance);
    const SparseGradient received = transfer(kLargestSums, all, k, partner, partner);
    if (!beyond) all = merge(all, received, 2 * distance);
  }
  if (within < among.count) {
    SparseGradient result =
        transfer(kLargestSums, all, k, rank_at(for_another, place + within), rank_at(beyond, place - within));
    if (beyond) all = std::move(result);
  }
  residual.add(without(own, all));
  for (const SparseGradient& sums : dropped) residual.add(common(sums, all));
  return all;
}

}  // namespace reef
