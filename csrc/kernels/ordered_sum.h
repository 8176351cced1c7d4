#pragma once

#include <cstdint>
#include <vector>

namespace reef::kernels {

/// to[i] = (((parts[0][i] + parts[1][i]) + parts[2][i]) + ...) / divisor: the same bits as an operator for
/// each would give. `to` may be one of the parts. Two parts or more; one pass over memory.
void ordered_sum(const std::vector<const float*>& parts, float* to, std::int64_t elements, int divisor);

}  // namespace reef::kernels
