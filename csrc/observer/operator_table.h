#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace at {
struct RecordFunction;
}  // namespace at

namespace reef {

/// What Reef knows of an operator: made at its first call, never destroyed, so pointers to it and to its
/// names stay good.
struct Operator {
  std::string name;                    ///< "aten::add_"
  std::string name_in_backward;        ///< "aten::add_ (backward)"
  bool is_operator = false;            ///< false: a named range without a schema, such as autograd's own
  bool is_collective = false;          ///< of the c10d namespace
  bool touches_memory = false;         ///< false: a view, or composed of other operators, which are observed
  bool makes_alike = false;            ///< zeros_like, clone and so on: the result is of the argument's kind
  std::uint64_t writes_arguments = 0;  ///< bit i: argument i is written; the last bit is for all after it too

  bool writes(std::size_t argument) const {
    return (writes_arguments >> std::min<std::size_t>(argument, 63) & 1) != 0;
  }
};

/// Looked up by name and overload, without a lock from the second call on. About 20 ns.
const Operator& operator_of(const at::RecordFunction& call);

}  // namespace reef
