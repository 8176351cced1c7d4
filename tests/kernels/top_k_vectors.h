// Vectors of every kind to take the largest elements of, and what a sort takes of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/top_k.h"

namespace reef::top_k_vectors {

using kernels::is_larger;
using kernels::magnitude_bits;
using kernels::SparseEntry;

using Values = std::vector<float>;

enum class Kind {
  kNormal,
  kManyMagnitudes,
  kAnyBits,
  kFewValues,
  kMostlyZero,
  kNotFinite,
  kDecreasing,
  kPeriodic,
  kCount
};

inline Values values_of(Kind kind, std::size_t elements, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Values values(elements);
  for (std::size_t i = 0; i < elements; ++i) {
    float& value = values[i];
    value = normal(random);
    switch (kind) {
      case Kind::kManyMagnitudes:
        value *= std::exp2(static_cast<float>(random() % 200) - 100.0F);
        break;
      case Kind::kAnyBits:  // with what is not normal, and without NaN, whose bits a sum may choose
        value = __builtin_bit_cast(float, static_cast<std::uint32_t>(random()));
        if (!std::isfinite(value)) value = std::copysign(std::numeric_limits<float>::infinity(), value);
        break;
      case Kind::kFewValues:
        value = static_cast<float>(random() % 5) - 2.0F;
        break;
      case Kind::kMostlyZero:
        value *= random() % 50 == 0 ? 1.0F : 0.0F;
        break;
      case Kind::kNotFinite:
        if (random() % 7 == 0)
          value = random() % 2 == 0 ? std::nanf("") : -std::numeric_limits<float>::infinity();
        break;
      case Kind::kDecreasing:
        value = 1.0F / static_cast<float>(i + 1);
        break;
      case Kind::kPeriodic:
        value = i % 64 == 0 ? 100.0F + value : value;
        break;
      default:
        break;
    }
  }
  return values;
}

/// Bit for bit, but for the sign of a NaN.
inline bool same(const std::vector<SparseEntry>& a, const std::vector<SparseEntry>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const SparseEntry& x, const SparseEntry& y) {
    const bool same_sign = std::signbit(x.value) == std::signbit(y.value) || std::isnan(x.value);
    return x.index == y.index && magnitude_bits(x.value) == magnitude_bits(y.value) && same_sign;
  });
}

inline bool by_index(const SparseEntry& a, const SparseEntry& b) { return a.index < b.index; }

struct Taken {
  std::vector<SparseEntry> entries;
  Values left;
};
inline Taken by_sort(const Values& gradient, const Values& residual, std::int64_t k) {
  Taken taken;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const float sum = residual.empty() ? gradient[i] : gradient[i] + residual[i];
    taken.left.push_back(sum);
    if (magnitude_bits(sum) != 0) taken.entries.push_back({static_cast<std::uint32_t>(i), sum});
  }
  std::sort(taken.entries.begin(), taken.entries.end(), is_larger);
  taken.entries.resize(std::min(taken.entries.size(), static_cast<std::size_t>(k)));
  for (const SparseEntry& entry : taken.entries) taken.left[entry.index] = 0;
  for (float& value : taken.left) value = std::isfinite(value) ? value : 0;
  std::sort(taken.entries.begin(), taken.entries.end(), by_index);
  return taken;
}

/// Calls `visit(gradient, residual, k, text)` for vectors of every kind and share, with a residual and
/// without, until one has failed; sizes around what is sampled, looked at together, or a tile.
template <class Visit>
void each_vector(const Visit& visit) {
  std::mt19937_64 random(1);
  for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
    for (const std::size_t elements : {1, 2, 31, 32, 33, 255, 257, 1000, 16383, 16384, 16385, 50000}) {
      for (const double density : {1e-6, 0.001, 0.01, 0.1, 0.5, 0.999, 1.0}) {
        for (const bool has_residual : {false, true}) {
          if (::testing::Test::HasFailure()) return;
          const Values gradient = values_of(static_cast<Kind>(kind), elements, random);
          const Values residual = has_residual ? values_of(Kind::kNormal, elements, random) : Values();
          const auto k = static_cast<std::int64_t>(std::ceil(density * static_cast<double>(elements)));
          visit(gradient, residual, k,
                "kind " + std::to_string(kind) + ", " + std::to_string(elements) + " elements, k " +
                    std::to_string(k) + (has_residual ? ", with a residual" : ""));
        }
      }
    }
  }
}

}  // namespace reef::top_k_vectors
