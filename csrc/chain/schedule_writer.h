#pragma once

#include <cstdint>

#include "reef/schedule.h"

namespace reef {

/// The same schedule, whose outputs are forgotten as soon as nothing reads them any more.
Schedule drop_early(const Schedule& schedule);

/// Puts a schedule together from what solvers decide of pieces of the chain.
class ScheduleWriter {
 public:
  using Kind = ScheduleOp::Kind;
  explicit ScheduleWriter(std::uint32_t stages) { schedule_.stages = stages; }

  void add(Kind kind, std::uint32_t stage) { schedule_.operations.push_back({kind, stage}); }
  /// Output 0 is not the schedule's.
  void drop_output(std::uint32_t stage) {
    if (stage > 0) add(Kind::kDropOutput, stage);
  }
  /// Stages s to e run forward, and only the last output is kept.
  void sweep(std::uint32_t s, std::uint32_t e) {
    for (std::uint32_t j = s; j <= e; ++j) {
      add(Kind::kForward, j);
      if (j > s) drop_output(j - 1);
    }
  }
  /// Stage s, the last of its piece: its tape made anew and used, or the loss.
  void turn(std::uint32_t s) {
    if (s > schedule_.stages) {
      add(Kind::kLoss, 0);
      return;
    }
    add(Kind::kRetape, s);
    add(Kind::kBackward, s);
  }
  Schedule take() const { return drop_early(schedule_); }

 private:
  Schedule schedule_;
};

}  // namespace reef
