#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace reef {

/// Pure code: which parameters an outer step is of, and after which local steps it is begun and applied.

/// Cuts a list of tensors of so many elements into `parts` that follow each other, of about as many elements,
/// none without a tensor: where each ends. There are as many tensors as parts, or more.
std::vector<std::size_t> cut_into_parts(const std::vector<std::int64_t>& elements, std::size_t parts);

/// See LocalUpdatesOptions. Steps are counted from 1.
struct OuterSchedule {
  std::int64_t local_steps = 1;
  std::int64_t parts = 1;
  std::int64_t overlap_steps = 0;

  /// After which step of a round.
  std::int64_t offset(std::size_t part) const {
    return local_steps * (static_cast<std::int64_t>(part) + 1) / parts;
  }
  bool begins(std::size_t part, std::int64_t step) const { return is_due(step - offset(part)); }
  bool applies(std::size_t part, std::int64_t step) const {
    return is_due(step - offset(part) - overlap_steps);
  }

 private:
  bool is_due(std::int64_t since_first) const { return since_first >= 0 && since_first % local_steps == 0; }
};

}  // namespace reef
