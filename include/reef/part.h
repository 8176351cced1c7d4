#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/export.h"

namespace reef {

/// What a tensor is of a larger one, of which others keep the rest: its elements in memory, from `first` on.
struct Part {
  std::int64_t first = 0;
  std::int64_t whole_elements = 0;
  /// Where several ranks have the same part: which of them this is. Sums over ranks take number 0.
  std::int64_t copy = 0;
  bool operator==(const Part&) const = default;
};

/// Notes it on the tensor itself: what is detached from it is the same part, and what operators make of it is
/// none. Optimizers of reef::optim step a part as they would have stepped it in the whole, bit for bit, if
/// `first` is a multiple of kShardAlignment, and refuse what needs the whole. `whole_shape`: of the whole, if
/// it has other than one dimension. Throws ConfigError if the elements do not lie in the whole, the copy is
/// negative, or the shape is one of another number of elements.
REEF_API void set_part(const at::Tensor& tensor, const Part& part,
                       at::OptionalIntArrayRef whole_shape = std::nullopt);

/// Nothing for a tensor that is whole.
REEF_API std::optional<Part> part_of(const at::Tensor& tensor);

/// The shape of what the tensor is a part of; of a tensor that is whole its own.
REEF_API std::vector<std::int64_t> whole_shape_of(const at::Tensor& tensor);

}  // namespace reef
