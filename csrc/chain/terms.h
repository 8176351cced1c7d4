#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reef/chain_profile.h"

namespace reef {

/// Of a tape, without the outputs that it holds.
inline std::uint64_t own_tape_bytes(const StageProfile& stage) {
  return stage.tape_bytes - (stage.tape_has_output ? stage.output_bytes : 0);
}

/// Of a stage that keeps its tape: with the output, once.
inline std::uint64_t kept_bytes(const StageProfile& stage) {
  return stage.tape_bytes + (stage.tape_has_output ? 0 : stage.output_bytes);
}

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
  std::vector<std::uint64_t> behind;        ///< gradients of parameters of all stages behind this one
  std::vector<bool> has_input, has_output;  ///< the tape
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

  /// Whether nothing needs the input of s any more once its tape is there, and it is a stage's output. Inside
  /// a piece that begins with s it then goes; unless it is on the tape of s - 1.
  bool input_may_go(std::uint32_t s) const { return s > 1 && !has_input[s]; }
  /// What that frees.
  std::uint64_t freed_bytes(std::uint32_t s, bool input_goes) const { return input_goes ? output[s - 1] : 0; }

  /// The last stage of a piece: its tape is made anew, and used.
  std::uint64_t last_bytes(std::uint32_t s, bool input_goes) const {
    return std::max(behind[s] + output[s] + retape[s], backward_bytes(s, input_goes));
  }
  /// Stage s keeps its tape while what is behind it in the piece, up to t, runs forward and backward.
  std::uint64_t taped_bytes(std::uint32_t s, std::uint32_t t, bool input_goes) const {
    return std::max(behind[t] + output[t] + taped[s], backward_bytes(s, input_goes));
  }
  /// Stages from s run forward, none of them kept, and now j.
  std::uint64_t sweep_bytes(std::uint32_t s, std::uint32_t t, std::uint32_t j) const {
    return behind[t] + output[t] + (j > s ? output[j - 1] : 0) + forward[j];
  }

 private:
  std::uint64_t backward_bytes(std::uint32_t s, bool input_goes) const {
    const std::uint64_t bytes = behind[s] + output[s] + tape[s] + backward[s];
    return bytes - std::min(bytes, freed_bytes(s, input_goes));
  }
  void add(const StageProfile& stage) {
    output.push_back(stage.output_bytes);
    tape.push_back(stage.tape_bytes);
    kept.push_back(kept_bytes(stage));
    has_input.push_back(stage.tape_has_input);
    has_output.push_back(stage.tape_has_output);
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

}  // namespace reef
