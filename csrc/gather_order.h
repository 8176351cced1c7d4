#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace reef {

/// In which order operators use buckets, learned from one step and expected of the next; and what of them to
/// have in memory. Pure data and pure code. Every rank that sees the same uses decides the same.
class GatherOrder {
 public:
  enum class Phase : std::uint8_t { kForward, kBackward };

  /// `bytes` of each bucket, whole.
  explicit GatherOrder(std::vector<std::int64_t> bytes);

  /// An operator uses this bucket now.
  void use(std::size_t bucket, Phase phase);
  /// What was used since the last such call is what the next step is expected to use.
  void end_step();

  /// A bucket as it is now.
  struct Held {
    bool there = false;   ///< in memory, or on its way
    bool in_use = false;  ///< by a running operator: it stays
  };
  struct Moves {
    std::vector<std::size_t> drop;
    std::vector<std::size_t> fetch;  ///< in order, after that
  };
  /// What to do for the buckets that an operator is about to use (they are in_use), and ahead of those after
  /// it, so that no more than `resident_bytes` are there: the farthest leaves first (Belady 1966). What
  /// operators use is there whatever its size, and beside it there is room for one on its way, so
  /// `resident_bytes` is no less than twice the largest.
  Moves plan(const std::vector<std::size_t>& needed, const std::vector<Held>& held,
             std::int64_t resident_bytes) const;

 private:
  struct Use {
    std::size_t bucket;
    Phase phase;
    bool operator==(const Use&) const = default;
  };
  bool known() const { return position_ < expected_.size(); }
  // Where in the step it is used next, from there on; kNever if it is not. In a step like none before: the
  // later, the longer ago its last use is.
  std::size_t next_use(std::size_t bucket, std::size_t from) const;

  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

  std::vector<std::int64_t> bytes_;
  std::int64_t largest_ = 0;
  std::vector<Use> expected_;
  std::size_t position_ = 0;  ///< in it, of the use that is now; its size: none is like this one
  std::vector<Use> seen_;
  std::vector<std::size_t> last_;  ///< by bucket: number of its last use, from 1
  std::size_t uses_ = 0;
};

}  // namespace reef
