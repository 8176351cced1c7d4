#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace reef {

/// In which order operators use buckets, learned from one step and expected of the next, and from one pass of
/// an evaluation (or of a server) and expected of the next; and what of them to have in memory. Pure data and
/// pure code. Every rank that sees the same uses decides the same.
class GatherOrder {
 public:
  enum class Phase : std::uint8_t {
    kForward,
    kBackward,
    kEvaluation,  ///< not recorded by autograd; between recorded uses it is one of the step
  };

  /// `bytes` of each bucket, whole.
  explicit GatherOrder(std::vector<std::int64_t> bytes);

  /// An operator uses this bucket now.
  void use(std::size_t bucket, Phase phase);
  /// What was used since the last such call is what the next step is expected to use. An evaluation needs no
  /// such call: its pass is over when its first bucket comes again, or a step begins.
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
  // What comes, in order: of a step, or of the passes of an evaluation.
  struct Sequence {
    std::vector<Use> expected;
    std::size_t position = 0;  ///< in it, of the use that is now; its size: none is like this one
    std::vector<Use> seen;

    bool known() const { return position < expected.size(); }
    void use(const Use& now);
    void end();
  };
  // From the use that is now on. Empty: it is like none before.
  std::vector<std::size_t> future() const;
  // Where in the future it is used next, from there on; kNever if it is not. Without one: the later, the
  // longer ago its last use is.
  std::size_t next_use(const std::vector<std::size_t>& future, std::size_t bucket, std::size_t from) const;

  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

  std::vector<std::int64_t> bytes_;
  std::int64_t largest_ = 0;
  Sequence step_, evaluation_;
  bool evaluates_ = false;
  std::vector<std::size_t> last_;  ///< by bucket: number of its last use, from 1
  std::size_t uses_ = 0;
};

}  // namespace reef
