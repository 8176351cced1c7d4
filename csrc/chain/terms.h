#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reef/chain_profile.h"
#include "reef/schedule.h"

namespace reef {

/// A profile as the solvers see it: stages from 1, and behind the last one the loss as a stage of its own,
/// `count`, which makes the gradient of the last output. What is needed of a piece s..t of the chain is above
/// what lies outside it: the input of s among that. Inside are the gradient of output t, and those of the
/// parameters of what is behind t.
struct ChainTerms {
  std::uint32_t count = 1;             ///< with the loss
  std::vector<std::uint64_t> output;   ///< bytes; of the loss: 0
  std::vector<std::uint64_t> tape;     ///< kept for backward
  std::vector<std::uint64_t> kept;     ///< tape and output together
  std::vector<std::uint64_t> forward;  ///< peaks
  std::vector<std::uint64_t> taped;
  std::vector<std::uint64_t> retape;
  std::vector<std::uint64_t> backward;
  std::vector<std::uint64_t> behind;  ///< gradients of parameters of all stages behind this one
  std::vector<double> forward_seconds, retape_seconds, backward_seconds;
  std::vector<double> forward_until;  ///< seconds of a forward pass of stages 1 to i

  explicit ChainTerms(const ChainProfile& profile) {
    add({});
    for (const StageProfile& stage : profile.stages) add(stage);
    add({});  // the loss
    count = static_cast<std::uint32_t>(output.size() - 1);
    backward[count] = output[count - 1];
    behind.assign(output.size(), 0);
    for (std::uint32_t i = count - 1; i-- > 0;) behind[i] = behind[i + 1] + profile.stages[i].gradient_bytes;
  }

  /// The last stage of a piece: its tape is made anew, and used.
  std::uint64_t last_bytes(std::uint32_t s) const {
    return behind[s] + output[s] + std::max(retape[s], tape[s] + backward[s]);
  }
  /// Stage s keeps its tape while what is behind it in the piece, up to t, runs forward and backward.
  std::uint64_t taped_bytes(std::uint32_t s, std::uint32_t t) const {
    return std::max(behind[t] + output[t] + taped[s], behind[s] + output[s] + tape[s] + backward[s]);
  }
  /// Stages from s run forward, none of them kept, and now j.
  std::uint64_t sweep_bytes(std::uint32_t s, std::uint32_t t, std::uint32_t j) const {
    return behind[t] + output[t] + (j > s ? output[j - 1] : 0) + forward[j];
  }

 private:
  void add(const StageProfile& stage) {
    output.push_back(stage.output_bytes);
    tape.push_back(stage.tape_bytes);
    kept.push_back(stage.tape_bytes + (stage.tape_has_output ? 0 : stage.output_bytes));
    forward.push_back(stage.forward_bytes);
    taped.push_back(stage.taped_bytes);
    retape.push_back(stage.retape_bytes);
    backward.push_back(stage.backward_bytes);
    forward_seconds.push_back(stage.forward_seconds);
    retape_seconds.push_back(stage.retape_seconds);
    backward_seconds.push_back(stage.backward_seconds);
    forward_until.push_back((forward_until.empty() ? 0 : forward_until.back()) + stage.forward_seconds);
  }
};

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
  Schedule take() { return std::move(schedule_); }

 private:
  Schedule schedule_;
};

}  // namespace reef
