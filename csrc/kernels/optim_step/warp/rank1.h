#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "kernels/optim_step/warp/state.h"
#include "kernels/raise.h"

namespace reef::kernels::warp {

/// An unsigned state of a matrix, as ../rank1.h has it: a state as state.h has them, whose new scales are
/// there before its step is. raise() is a thread's part of them.
struct Rank1State {
  using Code = Int4Code<Lanes, false>;
  using Map = Code::Map;
  static decltype(auto) map() { return Code::map(); }
  // As the signed states beside it, which have something to exchange.
  static constexpr int kBlocks = 2;
  static constexpr int kSharing = kThreads;

  REEF_LANE static void begin(const OptimState& state, const Part& part, const Map&, F (&x)[kOwn]) {
    const auto pairs = load4<std::uint8_t>(state.codes, at(part), part.there(0));
    each_own(state, part, reinterpret_cast<const float*>(state.scales), [&](int k, F scale) {
      x[k] = Code::value(nibble(I{pairs.v[k % 4]}, k / 4), scale * F{1.0F / 16});
    });
  }

  REEF_LANE static void keep(F (&x)[kOwn], float* largest) {
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) x[k] = min(x[k], F{FLT_MAX});
    REEF_UNROLL
    for (int block = 0; block < kBlocks; ++block) largest[block] = 0;
  }

  REEF_LANE static void end(const OptimState& state, const Part& part, const Map& map, std::uint32_t,
                            const float*, F (&x)[kOwn]) {
    const Code code(map);
    Four<std::uint8_t> halves[2]{};
    each_own(state, part, state.new_scales, [&](int k, F scale) {
      const F units = F{Code::kUnits} / max(scale, F{FLT_MIN * Code::kUnits});
      halves[k / 4].v[k % 4] = static_cast<std::uint8_t>(code.find(x[k], units).v);
    });
    store4(state.codes, at(part), part.there(0), paired(halves));
  }

  REEF_LANE static void raise(const OptimState& state, const Part& part, const F (&x)[kOwn]) {
    float* const of_columns = state.new_scales + state.matrix.rows;
    std::int64_t before = 0;
    float most = 0;
    each_place(state, part, [&](int k, std::int64_t row, std::int64_t column) {
      const float own = min(x[k], F{FLT_MAX}).v;
      raise_to(of_columns + column, own);
      if (row != before && most > 0) {
        raise_to(state.new_scales + before, most);
        most = 0;
      }
      before = row;
      most = most < own ? own : most;
    });
    if (most > 0) raise_to(state.new_scales + before, most);
  }

 private:
  REEF_LANE static std::int64_t at(const Part& part) { return part.tile * kHalf + 4 * part.thread; }

  // Calls `work` with each element that is there, and its row and column.
  template <class Work>
  REEF_LANE static void each_place(const OptimState& state, const Part& part, const Work& work) {
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const std::int64_t first = state.first + part.first(half);
      std::int64_t row = first / state.matrix.columns;
      std::int64_t column = first - row * state.matrix.columns;
      REEF_UNROLL
      for (int k = 4 * half; k < 4 * half + 4; ++k) {
        if (part.has(k)) work(k, row, column);
        if (++column == state.matrix.columns) {
          column = 0;
          ++row;
        }
      }
    }
  }
  // And its scale, of these.
  template <class Work>
  REEF_LANE static void each_own(const OptimState& state, const Part& part, const float* scales,
                                 const Work& work) {
    each_place(state, part, [&](int k, std::int64_t row, std::int64_t column) {
      work(k, min(F{scales[row]}, F{scales[state.matrix.rows + column]}));
    });
  }
};

/// One thread's part of the survey of values that become such a state.
REEF_LANE void survey(const float* values, const OptimState& state, const Part& part) {
  F x[kOwn];
  read(OptimDtype::kFloat32, reinterpret_cast<const std::byte*>(values), part, x);
  Rank1State::raise(state, part, x);
}

/// A tensor's states, of which some are such ones.
template <bool kSigned>
using Int4Rank1State = std::conditional_t<kSigned, Int4State<true>, Rank1State>;

}  // namespace reef::kernels::warp
