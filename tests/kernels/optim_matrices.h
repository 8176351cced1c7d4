// Matrices whose unsigned states have scales of rows and columns (kInt4Rank1).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/optim_step/lanes_scalar.h"
#include "kernels/optim_step/rules.h"
#include "kernels/optim_tensors.h"

namespace reef::kernels {

inline constexpr auto kRank1 = static_cast<std::size_t>(OptimFormat::kInt4Rank1);
inline constexpr OptimMatrix kShapes[] = {{1, 1},   {3, 5},   {17, 40}, {2, 300},  {300, 2},
                                          {64, 64}, {5, 256}, {7, 255}, {1, 1000}, {1000, 1},
                                          {33, 77}, {4, 128}, {128, 4}, {50, 100}, {3, 1031}};

inline std::vector<bool> signs_of(OptimRule asked) {
  std::vector<bool> signs;
  for_every_rule<scalar::Lanes, false>([&]<class Rule>(OptimRule rule) {
    for (int i = 0; rule == asked && i < Rule::kStates; ++i) signs.push_back(Rule::is_signed(i));
  });
  return signs;
}

/// A matrix whose unsigned states have a scale for each row and each column.
struct Matrix {
  Matrix(Random& random, OptimRule with_rule, const OptimMatrix& of, const Choice& choice = {})
      : rule(with_rule),
        shape(of),
        tensor(random_tensor(random, OptimFormat::kInt4, of.rows * of.columns, choice)),
        signs(signs_of(with_rule)) {
    const auto count = static_cast<std::size_t>(shape.rows + shape.columns);
    for (std::size_t i = 0; i < signs.size(); ++i) {
      if (signs[i]) continue;
      tensor.scales[i].assign(4 * count, std::byte{0});
      new_scales[i].assign(count, 0);
    }
  }
  OptimTensor& view() {
    OptimTensor& plain = tensor.view();
    for (std::size_t i = 0; i < signs.size(); ++i) {
      if (signs[i]) continue;
      plain.states[i].matrix = shape;
      plain.states[i].new_scales = new_scales[i].data();
    }
    return plain;
  }
  std::size_t r() const { return static_cast<std::size_t>(rule); }

  std::int64_t survey(const OptimKernels& kernels) {
    for (auto& scales : new_scales) std::fill(scales.begin(), scales.end(), 0.0F);
    return kernels.survey[r()](view(), 0, tensor.tiles());
  }
  void settle() {
    for (std::size_t i = 0; i < signs.size(); ++i) {
      if (!signs[i]) std::memcpy(tensor.scales[i].data(), new_scales[i].data(), 4 * new_scales[i].size());
    }
  }
  std::int64_t step(const OptimKernels& kernels) {
    const std::int64_t bad = survey(kernels);
    if (bad > 0) return bad;
    EXPECT_EQ(kernels.step[r()][kRank1](view(), 0, tensor.tiles()), 0);
    settle();
    return 0;
  }
  void give_gradient(Random& random) {
    fill(tensor.gradient, tensor.plain.gradient_dtype, values(random, tensor.plain.elements, 0.1));
    tensor.plain.constants = random_constants(random);
  }

  OptimRule rule;
  OptimMatrix shape;
  Tensor tensor;
  std::vector<bool> signs;
  std::vector<float> new_scales[kMostStates];
};

inline std::vector<OptimRule> rules() {
  std::vector<OptimRule> found;
  for (int rule = 0; rule < kOptimRules; ++rule) {
    if (portable().survey[rule] != nullptr) found.push_back(static_cast<OptimRule>(rule));
  }
  return found;
}

}  // namespace reef::kernels
