#pragma once

#include <cstdint>
#include <vector>

#include "kernels/optim_step.h"

/// The oracle of the optimizers' kernels: one element at a time, codes found by looking through the map. Not
/// part of the library: the tests compile it.
namespace reef::kernels::reference {

/// What each code stands for, before its scale.
std::vector<float> map_of(OptimFormat format, bool is_signed);

/// The code of `value`, in [-1, 1]: the nearest, the larger of two that are as near. A second moment that is
/// not 0 never becomes 0.
int nearest_code(const std::vector<float>& map, bool is_signed, float value);

/// A whole step of a float32 tensor without master weights; in kInt4Rank1 with its survey. bfloat16 is not
/// for it: chance has no oracle.
std::int64_t step(const OptimTensor& tensor, OptimRule rule, OptimFormat format);

}  // namespace reef::kernels::reference
