#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace reef {

/// Pure code: what an exchange remembers (see ExchangeMemory), for other ranks or another layout.

/// What a rank remembers for elements [first, last) of a parameter.
struct RememberedPiece {
  std::int64_t rank = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;
  at::Tensor values;  ///< in one dimension, in the order of the parameter's memory
};

/// Elements [first, last) of a parameter, of which a rank is to remember values.
struct RememberedRange {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

/// The share of an element's sum for number `holder` of so many `holders` of the range: what the ranks have
/// that are number holder, holder + holders, ... among those that have the element, added up in that order;
/// zero, if there are none. So all shares together stay what they were, and with as many holders as there
/// were each is what it was, bit for bit. Undefined, where no piece has an element of the range. Throws
/// ConfigError if a rank has an element twice. `name` is for that.
at::Tensor share_of(const std::string& name, std::vector<RememberedPiece> pieces, RememberedRange range,
                    int holder, int holders);

/// What the first rank has that has the element. Undefined, where no piece has an element of the range.
/// Throws ConfigError if some elements are missing.
at::Tensor alike_of(const std::string& name, std::vector<RememberedPiece> pieces, RememberedRange range);

/// In that dtype. Throws ConfigError if rounding would change a value, so that something of what is held back
/// were lost.
at::Tensor exactly(const std::string& name, const at::Tensor& values, at::ScalarType dtype);

}  // namespace reef
