#pragma once

#include <cstdint>
#include <utility>

#include "kernels/optim_step/warp/part.h"
#include "kernels/optim_step/warp/state.h"

namespace reef::kernels::warp {

/// One thread's part of the step of a tile.
template <class Rule, template <bool> class State, bool kWhole>
class Step {
 public:
  static constexpr int kStates = Rule::kStates;
  static constexpr int kBlocks = State<true>::kBlocks;    ///< in each state
  static constexpr int kSharing = State<true>::kSharing;  ///< threads that share a block
  using Tables = Maps<State>;

  /// Begins to load the gradient, and the first half of everything else.
  REEF_LANE Step(const OptimTensor& tensor, const Part<kWhole>& part, const Tables& maps)
      : tensor_(tensor), part_(part), maps_(maps), parameter_(tensor) {
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      gradient_[half] = load4(tensor.gradient_dtype, tensor.gradient, part, half);
    }
    load(0, kEachState);
  }

  /// Returns how many of this thread's gradient elements are not finite.
  REEF_LANE int nonfinite() {
    const F gain{tensor_.constants.gradient};
    F poison{0};  // NaN as soon as a value is not finite.
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) to_floats(tensor_.gradient_dtype, gradient_[half], g_ + 4 * half);
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      g_[k] = g_[k] * gain;
      poison = fma(g_[k], F{0}, poison);
    }
    int found = 0;
    if (poison.v == 0) return found;
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) found += !(g_[k].v - g_[k].v == 0);
    return found;
  }

  /// Writes the new parameters, and the new states of formats without blocks. For other formats, sets
  /// `largest` to the largest new value of each block in this thread. All gradients of the warp must be
  /// finite.
  REEF_LANE void begin(float* largest) {
    advance([&](int half, const F* p) {
      parameter_.write(part_, half, key(), p);
      if constexpr (kBlocks == 0) write(half, kEachState);
    });
    if constexpr (kBlocks > 0) keep(largest, kEachState);
  }

  /// Writes the new states of formats with blocks; `largest` has the largest values of the whole blocks.
  REEF_LANE void end([[maybe_unused]] const float* largest) {
    if constexpr (kBlocks > 0) encode(largest, kEachState);
  }

  /// Is called instead of begin() and end(): computes the new states, but only raises those new scales that
  /// must be known before the step.
  REEF_LANE void survey() {
    advance([](int, const F*) {});
    raise(kEachState);
  }

  /// Is called instead of begin() and end(): returns sums of squares of this thread's elements for a trust
  /// ratio.
  REEF_LANE OptimSquares squares() {
    OptimSquares sum;
    const Rule rule(tensor_.constants);
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      F p[4];
      read(half, p);
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) {
        if (!part_.has(4 * half + k)) continue;
        F s[kStates + 1];
        read_states(half, k, s, kEachState);
        const double size = p[k].v;
        const double measured = rule.measured(p[k], g_[4 * half + k], s).v;
        sum.parameter += size * size;
        sum.measured += measured * measured;
      }
    }
    return sum;
  }

 private:
  static constexpr bool kHalves = requires { &Rule::begin; };
  static constexpr std::make_index_sequence<kStates> kEachState{};
  template <std::size_t i>
  using StateOf = State<Rule::is_signed(i)>;

  REEF_LANE std::uint32_t key() const { return key_of(tensor_.key, part_.tile); }
  template <std::size_t... i>
  REEF_LANE void load(int half, std::index_sequence<i...>) {
    old_parameter_ = parameter_.load(part_, half);
    (StateOf<i>::load(tensor_.states[i], part_, half, old_states_[i]), ...);
  }
  REEF_LANE void read(int half, F* p) {
    if (half > 0) load(half, kEachState);
    parameter_.read(old_parameter_, p);
  }
  template <std::size_t... i>
  REEF_LANE void read_states([[maybe_unused]] int half, [[maybe_unused]] int k, [[maybe_unused]] F* s,
                             std::index_sequence<i...>) const {
    ((s[i] = StateOf<i>::value(old_states_[i], maps_.template of<Rule::is_signed(i)>(), half, k)), ...);
  }
  // Computes the new states and passes the new parameters to `take`, half by half because registers are
  // scarce.
  template <class Take>
  REEF_LANE void advance(const Take& take) {
    const Rule rule(tensor_.constants);
    const float decay = Rule::kCouples ? tensor_.constants.coupled_decay : 0;
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      F p[4];
      read(half, p);
      F* const g = g_ + 4 * half;
      if (decay != 0) {
        REEF_UNROLL
        for (int k = 0; k < 4; ++k) g[k] = coupled<Lanes>(p[k], g[k], decay);
      }
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) {
        const bool has = part_.has(4 * half + k);
        F s[kStates + 1];
        read_states(half, k, s, kEachState);
        if constexpr (kHalves) {
          const F root = rule.begin(g[k], s);
          p[k] = rule.end(p[k], g[k], StateOf<0>::seen(s[0]), root);
        } else {
          rule.step(p[k], g[k], s);
        }
        REEF_UNROLL
        for (int i = 0; i < kStates; ++i) s_[i][4 * half + k] = has ? s[i] : F{0};  // Padding stays zero.
      }
      take(half, p);
    }
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
    if constexpr (requires { &StateOf<i>::template raise<kWhole>; }) {
      StateOf<i>::raise(tensor_.states[i], part_, s_[i]);
    }
  }
  template <std::size_t... i>
  REEF_LANE void write([[maybe_unused]] int half, std::index_sequence<i...>) {
    (StateOf<i>::write(tensor_.states[i], part_, half, key_of_state(key(), i), s_[i] + 4 * half), ...);
  }
  template <std::size_t... i>
  REEF_LANE void encode([[maybe_unused]] const float* largest, std::index_sequence<i...>) {
    (StateOf<i>::end(tensor_.states[i], part_, maps_.template of<Rule::is_signed(i)>(),
                     key_of_state(key(), i), largest + i * kBlocks, s_[i]),
     ...);
  }

  const OptimTensor& tensor_;
  const Part<kWhole> part_;
  const Tables& maps_;
  const Parameter parameter_;
  Four<4> gradient_[2];
  Parameter::Loaded old_parameter_;
  typename State<true>::Loaded old_states_[kStates + 1];
  F g_[kOwn];
  F s_[kStates + 1][kOwn];
};

/// Whether all memory that a step reads and writes is aligned to 16 bytes.
template <class Rule>
REEF_LANE bool is_aligned(const OptimTensor& tensor) {
  const auto with = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return are_aligned(tensor.parameter, tensor.gradient, tensor.master, tensor.states[i].codes...);
  };
  return with(std::make_index_sequence<Rule::kStates>());
}

}  // namespace reef::kernels::warp
