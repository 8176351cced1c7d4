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

bool has_lower_index(const SparseEntry& a, const SparseEntry& b) { return a.index < b.index; }

// Which of the two comes next is as good as random: selected without a branch.
SparseGradient added(const SparseGradient& a, const SparseGradient& b) {
  SparseGradient sum(a.size() + b.size());
  const SparseEntry *of_a = a.data(), *of_b = b.data();
  const SparseEntry *const end_of_a = of_a + a.size(), *const end_of_b = of_b + b.size();
  SparseEntry* to = sum.data();
  while (of_a != end_of_a && of_b != end_of_b) {
    const bool has_a = of_a->index <= of_b->index, has_b = of_b->index <= of_a->index;
    const float both = add(of_a->value, of_b->value);
    const SparseEntry one = has_a ? *of_a : *of_b;
    *to++ = {one.index, has_a && has_b ? both : one.value};
    of_a += has_a ? 1 : 0;
    of_b += has_b ? 1 : 0;
  }
  to = std::copy(of_a, end_of_a, to);
  to = std::copy(of_b, end_of_b, to);
  sum.resize(static_cast<std::size_t>(to - sum.data()));
  return sum;
}

}  // namespace

MergedSparse merge_largest(const SparseGradient& a, const SparseGradient& b, std::size_t k) {
  MergedSparse merged{added(a, b), {}};
  kernels::keep_largest(merged.kept, k, &merged.dropped);
  return merged;
}

SparseGradient without(const SparseGradient& a, const SparseGradient& b) {
  SparseGradient rest;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(rest), has_lower_index);
  return rest;
}

SparseGradient common(const SparseGradient& a, const SparseGradient& b) {
  SparseGradient both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both), has_lower_index);
  return both;
}

SparseGradient sum_of(const std::vector<SparseGradient>& all) {
  SparseGradient sum;
  for (const SparseGradient& each : all) sum = added(sum, each);
  return sum;
}

}  // namespace reef
