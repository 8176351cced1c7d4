#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace reef {

/// So many elements of a parameter's gradient that are NaN or infinite.
struct NonFiniteElements {
  std::string parameter;  ///< the module's name for it
  /// Whose gradient has them; nothing: no rank's has, and they are in what has come of all: a sum, or a code
  /// of 16 bits, has overflowed.
  std::optional<int> rank;
  std::int64_t elements = 0;
};

}  // namespace reef
