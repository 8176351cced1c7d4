#pragma once

#include <cstdint>
#include <map>

namespace reef {

/// Which ranges of a file are free. Pure. The lowest range that fits is taken, so the file stays as short as
/// it can.
class Extents {
 public:
  /// The offset of `bytes` > 0 taken; grows end() if no hole is large enough.
  std::uint64_t take(std::uint64_t bytes);
  /// A range taken before, whole.
  void give_back(std::uint64_t offset, std::uint64_t bytes);
  /// What take(bytes) would give.
  std::uint64_t peek(std::uint64_t bytes) const;
  /// Everything from here on is free.
  std::uint64_t end() const { return end_; }

 private:
  std::map<std::uint64_t, std::uint64_t> holes_;  ///< offset to bytes; never adjacent, never touching end_
  std::uint64_t end_ = 0;
};

}  // namespace reef
