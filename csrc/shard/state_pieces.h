#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace reef {

/// What is kept for a parameter, or for a part of it, by key. Tensors that have dimensions are of the
/// elements, in the order of memory, and all else is of the parameter as a whole (a count of steps).
using StateValues = std::vector<std::pair<std::string, c10::IValue>>;

/// Elements [first, last) of a parameter, and what is kept for them.
struct StatePiece {
  std::int64_t first = 0;
  std::int64_t last = 0;
  const StateValues* values = nullptr;
};

/// The parameter itself. Only its sizes and strides are looked at.
struct StateSubject {
  std::string name;
  at::Tensor parameter;
};

/// What is kept for elements [first, last) of a parameter, of pieces in any order that hold all of them;
/// where they hold the same, the first given counts. `first`, and where pieces begin and end, are multiples
/// of kShardAlignment or the parameter's ends: codes of few bits and their scales are cut between tiles of
/// so many. Tensors come contiguous, in memory of their own, with one dimension. Throws ConfigError if
/// elements are missing, and for tensors that are not by element.
StateValues part_values(const StateSubject& subject, std::int64_t first, std::int64_t last,
                        const std::vector<StatePiece>& pieces);

/// The same for what a rank keeps. Numbers, as many as elements, have the shape of the part.
StateValues kept_values(const StateSubject& subject, std::int64_t first, std::int64_t last,
                        const std::vector<StatePiece>& pieces);

/// What is kept for a parameter or a part of it, in one dimension and in the order of the parameter's memory.
at::Tensor in_memory_order(const StateSubject& subject, const at::Tensor& value);

/// Throws ConfigError if the piece has a value that is neither by element nor of the parameter as a whole: a
/// tensor of another shape than the parameter, its part or the codes and scales of so many elements, or a
/// list.
void check_by_element(const StateSubject& subject, const StatePiece& piece);

/// For all of a parameter. Numbers, as many as it has elements, have its sizes and strides.
StateValues whole_values(const StateSubject& subject, const std::vector<StatePiece>& pieces);

/// "name[first:last]", or "name" for the whole: the range in it, or [0, elements) and the name as it is.
struct PieceName {
  std::string parameter;
  std::int64_t first = 0;
  std::int64_t last = -1;  ///< -1: to the end
};
PieceName parse_piece_name(const std::string& name);
std::string piece_name(const std::string& parameter, std::int64_t first, std::int64_t last);

}  // namespace reef
