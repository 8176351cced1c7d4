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
  std::string name;              ///< "aten::add_"
  std::string name_in_backward;  ///< "aten::add_ (backward)"
  bool is_operator = false;      ///< false: a named range without a schema, such as autograd's own
  bool is_of_reducer = false;    ///< a range of DDP's reducer, about one of its buckets
  bool is_collective = false;    ///< of the c10d namespace
  bool is_composite = false;     ///< it has no kernel of its own, and calls operators, which are observed
  bool is_view = false;          ///< of LibTorch's own: its result shares its argument's memory
  bool is_of_torch = false;      ///< of the aten or prims namespace: its schema tells the truth
  bool makes_alike = false;      ///< zeros_like, clone and so on: the result is of the argument's kind
  std::uint64_t writes_arguments = 0;  ///< bit i: argument i is written; the last bit is for all after it too
  /// The same, where the schemas of others than LibTorch are taken at their word.
  std::uint64_t says_it_writes_arguments = 0;

  /// It has a kernel that reads or writes memory.
  bool touches_memory() const { return is_operator && !is_composite && !is_view; }
  bool writes(std::size_t argument) const {
    return (writes_arguments >> std::min<std::size_t>(argument, 63) & 1) != 0;
  }
  bool says_it_writes(std::size_t argument) const {
    return (says_it_writes_arguments >> std::min<std::size_t>(argument, 63) & 1) != 0;
  }
};

/// Looked up by name and overload, without a lock from the second call on. About 20 ns.
const Operator& operator_of(const at::RecordFunction& call);

}  // namespace reef
