#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace reef {

/// Ranges of numbers (addresses, offsets) that nobody uses. Pure; not thread-safe. What is given back joins
/// its neighbours; the smallest range that is large enough is taken first. O(log n) each, where alignment
/// does not rule ranges out.
class FreeRanges {
 public:
  struct Range {
    std::uint64_t start;
    std::uint64_t bytes;
  };

  /// [start, start + bytes) is free; nothing of it was.
  void add(std::uint64_t start, std::uint64_t bytes);
  /// The start of `bytes` > 0 that are no longer free, a multiple of `alignment`; nothing: no range has them.
  std::optional<std::uint64_t> take(std::uint64_t bytes, std::uint64_t alignment = 1);
  /// [start, start + bytes), all of which is free, no longer is.
  void take_at(std::uint64_t start, std::uint64_t bytes);
  /// Up to `bytes` from the start of the largest range; nothing: there is none.
  std::optional<Range> take_largest(std::uint64_t bytes);
  /// Up to `bytes` from the end of the smallest range; nothing: there is none.
  std::optional<Range> take_smallest(std::uint64_t bytes);

  std::uint64_t bytes() const { return bytes_; }  ///< of all ranges

 private:
  using BySize = std::set<std::pair<std::uint64_t, std::uint64_t>>;  ///< bytes, start

  void insert(std::uint64_t start, std::uint64_t bytes);
  void erase(std::uint64_t start, std::uint64_t bytes);

  std::map<std::uint64_t, std::uint64_t> by_start_;  ///< to bytes; no two adjacent
  BySize by_size_;
  std::uint64_t bytes_ = 0;
};

}  // namespace reef
