#include "shard/sparse_gradient.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace reef {
namespace {

using kernels::SparseEntry;

float add(float a, float b) {
  const float sum = a + b;
  return std::isnan(sum) ? std::numeric_limits<float>::quiet_NaN() : sum;
}

SparseGradient added(const SparseGradient& a, const SparseGradient& b) {
  SparseGradient sum;
  sum.reserve(a.size() + b.size());
  auto of_a = a.begin();
  auto of_b = b.begin();
  while (of_a != a.end() || of_b != b.end()) {
    if (of_b == b.end() || (of_a != a.end() && of_a->index < of_b->index)) {
      sum.push_back(*of_a++);
    } else if (of_a == a.end() || of_b->index < of_a->index) {
      sum.push_back(*of_b++);
    } else {
      sum.push_back({of_a->index, add(of_a->value, of_b->value)});
      ++of_a;
      ++of_b;
    }
  }
  return sum;
}

}  // namespace

MergedSparse merge_largest(const SparseGradient& a, const SparseGradient& b, std::size_t k) {
  MergedSparse merged{added(a, b), {}};
  SparseGradient& kept = merged.kept;
  if (kept.size() <= k) return merged;
  const auto last = kept.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(kept.begin(), last, kept.end(), kernels::is_larger);
  merged.dropped.assign(last, kept.end());
  kept.erase(last, kept.end());
  const auto by_index = [](const SparseEntry& x, const SparseEntry& y) { return x.index < y.index; };
  std::sort(kept.begin(), kept.end(), by_index);
  std::sort(merged.dropped.begin(), merged.dropped.end(), by_index);
  return merged;
}

SparseGradient without(const SparseGradient& a, const SparseGradient& b) {
  SparseGradient rest;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(rest),
                      [](const SparseEntry& x, const SparseEntry& y) { return x.index < y.index; });
  return rest;
}

SparseGradient sum_of(const std::vector<SparseGradient>& all) {
  SparseGradient sum;
  for (const SparseGradient& each : all) sum = added(sum, each);
  return sum;
}

}  // namespace reef
