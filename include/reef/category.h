#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "reef/export.h"

namespace reef {

/// What a block of memory holds. A block has exactly one category at a time, so the categories sum to the
/// total.
enum class Category : std::uint8_t {
  kParameter,       ///< parameters and buffers of a watched module
  kGradient,        ///< `.grad` of a watched parameter, from the moment autograd has accumulated it
  kOptimizerState,  ///< tensors that a watched optimizer's state refers to
  kActivation,  ///< born inside an operator that autograd records (grad mode on, an input requires grad), or
                ///< anywhere in backward
  kCommunication,  ///< born inside a c10d operator, or where a CategoryScope says so
  kOther,          ///< everything else: batches, evaluation, an optimizer's temporaries
};

inline constexpr std::size_t kCategories = 6;

/// "parameter", "gradient", "optimizer state", "activation", "communication buffer", "other".
REEF_API const char* name(Category category);

/// Bytes by category.
struct CategoryBytes {
  std::array<std::int64_t, kCategories> of{};

  std::int64_t& operator[](Category category) { return of[static_cast<std::size_t>(category)]; }
  std::int64_t operator[](Category category) const { return of[static_cast<std::size_t>(category)]; }
  std::int64_t total() const { return std::accumulate(of.begin(), of.end(), std::int64_t{0}); }
  bool operator==(const CategoryBytes&) const = default;
};

}  // namespace reef
