#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reef/chain_profile.h"
#include "reef/export.h"

namespace reef {

/// Pure data and pure code (no Torch): in which order the stages of a chain run forward, anew and backward,
/// what is kept between, and what leaves for a tier meanwhile. Stages are numbered from 1; output 0 is the
/// chain's input, which is always there and is not counted.

struct ScheduleOp {
  enum class Kind : std::uint8_t {
    kForward,     ///< F: output i is made of output i - 1; no tape
    kTaped,       ///< T: the same, and tape i
    kRetape,      ///< R: tape i of output i - 1, and no output: ends once the tape is whole
    kLoss,        ///< L: what the program does with the last output, until its gradient comes back
    kBackward,    ///< B: the gradient of output i - 1 of that of output i and tape i, which go
    kDropOutput,  ///< -a: output i is forgotten; its bytes stay while a tape holds it
    kDropTape,    ///< -t
    // Transfers are made one after another, beside the stages. A tape's bytes are those of its own, without
    // the outputs that it holds.
    kOffloadOutput,   ///< >a: begins to be copied to the tier, and stays
    kOffloadTape,     ///< >t
    kEvictOutput,     ///< ~a: its memory is free once the copy is there, which is waited for
    kEvictTape,       ///< ~t
    kPrefetchOutput,  ///< <a: takes memory, and begins to be copied back; what uses it waits
    kPrefetchTape,    ///< <t
  };
  Kind kind = Kind::kForward;
  std::uint32_t stage = 0;  ///< from 1; 0 for kLoss

  friend bool operator==(const ScheduleOp&, const ScheduleOp&) = default;
};

struct Schedule {
  std::uint32_t stages = 0;
  std::vector<ScheduleOp> operations;

  /// "F1 F2 -a1 T3 L B3 ...", as in ScheduleOp::Kind.
  REEF_API std::string text() const;
  REEF_API std::string json() const;
};

/// Throws ConfigError for what json() has not written.
REEF_API Schedule schedule_from_json(std::string_view text);

/// What is alive while an operation runs, at its peak.
struct ScheduleLoad {
  std::uint64_t output_bytes = 0;  ///< outputs that are kept, or that a tape holds
  std::uint64_t tape_bytes = 0;    ///< what tapes hold besides, and ChainProfile::state_bytes
  std::uint64_t gradient_bytes =
      0;                            ///< of parameters, so far, and of the output that is being gone back from
  std::uint64_t working_bytes = 0;  ///< what the operation needs on top

  std::uint64_t total() const { return output_bytes + tape_bytes + gradient_bytes + working_bytes; }
};

struct ScheduleCost {
  std::uint64_t peak_bytes = 0;
  std::size_t peak_operation = 0;  ///< the first at which it is reached
  double seconds = 0;
  double recomputed_seconds = 0;      ///< of these, of forward passes after the loss
  double waited_seconds = 0;          ///< of these, for transfers, or for the cores that they take
  std::uint64_t offloaded_bytes = 0;  ///< copied to the tier
  std::uint64_t tier_bytes = 0;       ///< the most that is there at once
  std::vector<ScheduleLoad> load;     ///< of each operation
  /// Of each operation, from when what it waits for is there; of a copy, as the lane makes it.
  std::vector<double> begin_seconds, end_seconds;
};

/// What a step costs: from the chain's input to its gradient, but for what the program does at the loss.
/// Throws ConfigError, naming the operation, if the schedule is for another number of stages or is not legal:
/// before the loss every stage runs once, in order; an operation finds what it needs, and makes nothing that
/// is there; backward goes from the last stage to the first; at the end nothing is left. The tier's copies go
/// with what they are of.
REEF_API ScheduleCost simulate(const ChainProfile& profile, const Schedule& schedule);

/// A self-contained SVG: time to the right; upward the bytes alive, by what they are, the peak marked, and
/// below a row for each stage that says when it runs. `budget_bytes` > 0 is drawn as a line.
REEF_API std::string schedule_chart(const ChainProfile& profile, const Schedule& schedule,
                                    std::uint64_t budget_bytes = 0, const std::string& title = "Schedule");

}  // namespace reef
