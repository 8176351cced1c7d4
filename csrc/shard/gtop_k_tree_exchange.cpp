#include "shard/gtop_k_tree_exchange.h"

#include <utility>

namespace reef {

SparseGradient GTopKTreeExchange::sum(const SparseGradient& own, std::size_t k, const RanksAmong& among,
                                      const Residual& residual) {
  constexpr const char* kMerge = "the tree of the largest sums";
  constexpr const char* kBroadcast = "the broadcast of the largest sums";
  // In the round of `distance`, the first of each two subtrees of so many ranks has the second's come to it.
  const auto second = [&](int distance) {
    const bool is = among.place % (2 * distance) == 0 && among.place + distance < among.count;
    return is ? std::optional(among.at(among.place + distance)) : std::nullopt;
  };
  const auto first = [&](int distance) {
    const bool is = among.place % (2 * distance) == distance;
    return is ? std::optional(among.at(among.place - distance)) : std::nullopt;
  };
  SparseGradient all = own;
  int distance = 1;
  for (; distance < among.count; distance *= 2) {
    const SparseGradient received = transfer(kMerge, all, k, first(distance), second(distance));
    if (second(distance)) all = merge_largest(all, received, k).kept;
  }
  while ((distance /= 2) > 0) {
    SparseGradient received = transfer(kBroadcast, all, k, second(distance), first(distance));
    if (first(distance)) all = std::move(received);
  }
  residual.add(without(own, all));
  return all;
}

}  // namespace reef
