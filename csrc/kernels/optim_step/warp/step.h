#pragma once

#include <cstdint>
#include <utility>

#include "kernels/optim_step/warp/part.h"
#include "kernels/optim_step/warp/state.h"

namespace reef::kernels::warp {

/// One thread's part of the step of one tile.
template <class Rule, template <bool> class State>
class Step {
 public:
  static constexpr int kStates = Rule::kStates;
  static constexpr int kBlocks = State<true>::kBlocks;    ///< of each state
  static constexpr int kSharing = State<true>::kSharing;  ///< threads
  using Tables = Maps<State>;

  REEF_LANE Step(const OptimTensor& tensor, const Part& part, const Tables& maps)
      : tensor_(tensor), part_(part), maps_(maps), parameter_(tensor), rule_(tensor.constants) {}

  /// Reads the gradient: how many of its elements here are not finite.
  REEF_LANE int nonfinite() {
    read(tensor_.gradient_dtype, tensor_.gradient, part_, g_);
    const F gain{tensor_.constants.gradient};
    int found = 0;
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      g_[k] = g_[k] * gain;
      found += !(g_[k].v - g_[k].v == 0);
    }
    return found;
  }

  /// If none of the warp is not finite: new states, and for each of them the largest of its blocks here.
  REEF_LANE void begin(float* largest) {
    advance();
    keep(largest, std::make_index_sequence<kStates>());
  }

  /// And with the largest of the whole blocks: writes it all.
  REEF_LANE void end(const float* largest) {
    const std::uint32_t key = key_of(tensor_.key, part_.tile);
    write(largest, key, std::make_index_sequence<kStates>());
    if constexpr (kHalves) {
      REEF_UNROLL
      for (int k = 0; k < kOwn; ++k) p_[k] = rule_.end(p_[k], g_[k], s_[0][k], half_[k]);
    }
    parameter_.write(part_, key, p_);
  }

  /// Instead: new states, of which only scales that must be known first are kept.
  REEF_LANE void survey() {
    advance();
    raise(std::make_index_sequence<kStates>());
  }

  /// Instead: squares of the elements here, of which a trust ratio is made.
  REEF_LANE OptimSquares squares() {
    OptimSquares sum;
    read_all(std::make_index_sequence<kStates>());
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      if (!part_.has(k)) continue;
      F s[kStates + 1];
      gather(s, k);
      const double p = p_[k].v;
      const double measured = rule_.measured(p_[k], g_[k], s).v;
      sum.parameter += p * p;
      sum.measured += measured * measured;
    }
    return sum;
  }

 private:
  static constexpr bool kHalves = requires { &Rule::begin; };
  template <std::size_t i>
  using StateOf = State<Rule::is_signed(i)>;

  template <std::size_t... i>
  REEF_LANE void read_all(std::index_sequence<i...>) {
    parameter_.read(part_, p_);
    (StateOf<i>::begin(tensor_.states[i], part_, maps_.template of<Rule::is_signed(i)>(), s_[i]), ...);
  }
  // New states, and the first half of the parameter's step.
  REEF_LANE void advance() {
    read_all(std::make_index_sequence<kStates>());
    const float decay = Rule::kCouples ? tensor_.constants.coupled_decay : 0;
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      F s[kStates + 1];
      gather(s, k);
      if (decay != 0) g_[k] = coupled<Lanes>(p_[k], g_[k], decay);
      if constexpr (kHalves) {
        half_[k] = rule_.begin(g_[k], s);
      } else {
        rule_.step(p_[k], g_[k], s);
      }
      REEF_UNROLL
      for (int i = 0; i < kStates; ++i) s_[i][k] = part_.has(k) ? s[i] : F{0};  // what is padded stays zero
    }
  }
  REEF_LANE void gather(F* s, int k) const {
    REEF_UNROLL
    for (int i = 0; i < kStates; ++i) s[i] = s_[i][k];
  }
  template <std::size_t... i>
  REEF_LANE void keep(float* largest, std::index_sequence<i...>) {
    (StateOf<i>::keep(s_[i], largest + i * kBlocks), ...);
  }
  template <std::size_t... i>
  REEF_LANE void raise(std::index_sequence<i...>) {
    (raise_of<i>(), ...);
  }
  template <std::size_t i>
  REEF_LANE void raise_of() {
    if constexpr (requires { &StateOf<i>::raise; }) StateOf<i>::raise(tensor_.states[i], part_, s_[i]);
  }
  template <std::size_t... i>
  REEF_LANE void write([[maybe_unused]] const float* largest, [[maybe_unused]] std::uint32_t key,
                       std::index_sequence<i...>) {
    (StateOf<i>::end(tensor_.states[i], part_, maps_.template of<Rule::is_signed(i)>(), key_of_state(key, i),
                     largest + i * kBlocks, s_[i]),
     ...);
  }

  const OptimTensor& tensor_;
  const Part part_;
  const Tables& maps_;
  const Parameter parameter_;
  const Rule rule_;
  F g_[kOwn], p_[kOwn], half_[kOwn];
  F s_[kStates + 1][kOwn];
};

}  // namespace reef::kernels::warp
