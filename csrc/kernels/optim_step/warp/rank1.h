#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "kernels/optim_step/warp/state.h"
#include "kernels/raise.h"

namespace reef::kernels::warp {

/// An unsigned state of a matrix with the format of ../rank1.h and the interface of state.h. Its new scales
/// must be known before the step: raise() raises them to what a thread's elements need.
struct Rank1State {
  using Code = Int4Code<Lanes, false>;
  using Map = Code::Map;
  using Loaded = Codes;
  static decltype(auto) map() { return Code::map(); }
  // The same as for Int4State, which the signed states have: those need an exchange, and Step has one number
  // of blocks for all states.
  static constexpr int kBlocks = 2;
  static constexpr int kSharing = kThreads;
  static constexpr int kMoreFours = 4;

  template <bool kWhole>
  REEF_LANE static void load(const OptimState& state, const Part<kWhole>& part, int half, Codes& codes) {
    if (half == 0) codes.bytes = load4<1>(state.codes, at(part), part, 0);
    REEF_UNROLL
    for (float& scale : codes.scales) scale = 0;
    each_own(state, part, half, reinterpret_cast<const float*>(state.scales),
             [&](int k, F scale) { codes.scales[k] = scale.v; });
  }
  REEF_LANE static F value(const Codes& codes, const Map&, int half, int k) {
    return Code::value(nibble(codes.bytes[k], half), F{codes.scales[k]} * F{1.0F / 16});
  }
  REEF_LANE static F seen(F x) { return x; }

  REEF_LANE static void keep(F (&x)[kOwn], float* largest) {
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) x[k] = min(x[k], F{FLT_MAX});
    REEF_UNROLL
    for (int block = 0; block < kBlocks; ++block) largest[block] = 0;
  }

  template <bool kWhole>
  REEF_LANE static void end(const OptimState& state, const Part<kWhole>& part, const Map& map, std::uint32_t,
                            const float*, F (&x)[kOwn]) {
    const Code code(map);
    Four<1> halves[2]{};
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      each_own(state, part, half, state.new_scales, [&](int k, F scale) {
        const F units = F{Code::kUnits} / max(scale, F{FLT_MIN * Code::kUnits});
        halves[half].put(k, scalar::raw(code.find(x[4 * half + k], units)) & 0xFFU);
      });
    }
    store4(state.codes, at(part), part, 0, paired(halves));
  }

  template <bool kWhole>
  REEF_LANE static void raise(const OptimState& state, const Part<kWhole>& part, const F (&x)[kOwn]) {
    float* const of_columns = state.new_scales + state.matrix.rows;
    std::int64_t before = 0;
    float most = 0;
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      each_place(state, part, half, [&](int k, std::int64_t row, std::int64_t column) {
        const float own = min(x[4 * half + k], F{FLT_MAX}).v;
        raise_to(of_columns + column, own);
        if (row != before && most > 0) {
          raise_to(state.new_scales + before, most);
          most = 0;
        }
        before = row;
        most = most < own ? own : most;
      });
    }
    if (most > 0) raise_to(state.new_scales + before, most);
  }

 private:
  template <bool kWhole>
  REEF_LANE static std::int64_t at(const Part<kWhole>& part) {
    return part.tile * kHalf + 4 * part.thread;
  }

  // Calls `work(k, row, column)` for each element of a half that is in the tensor.
  template <bool kWhole, class Work>
  REEF_LANE static void each_place(const OptimState& state, const Part<kWhole>& part, int half,
                                   const Work& work) {
    const std::int64_t first = state.first + part.first(half);
    std::int64_t row = first / state.matrix.columns;
    std::int64_t column = first - row * state.matrix.columns;
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) {
      if (part.has(4 * half + k)) work(k, row, column);
      if (++column == state.matrix.columns) {
        column = 0;
        ++row;
      }
    }
  }
  // Calls `work(k, scale)` for each element of a half that is in the tensor; the scale is one of `scales`.
  template <bool kWhole, class Work>
  REEF_LANE static void each_own(const OptimState& state, const Part<kWhole>& part, int half,
                                 const float* scales, const Work& work) {
    const float* const from = global(scales);
    each_place(state, part, half, [&](int k, std::int64_t row, std::int64_t column) {
      work(k, min(F{from[row]}, F{from[state.matrix.rows + column]}));
    });
  }
};

/// Does one thread's part of the survey of values that will be encoded in a Rank1State.
template <bool kWhole>
REEF_LANE void survey(const float* values, const OptimState& state, const Part<kWhole>& part) {
  F x[kOwn];
  REEF_UNROLL
  for (int half = 0; half < 2; ++half) {
    const auto* const from = reinterpret_cast<const std::byte*>(values);
    to_floats(OptimDtype::kFloat32, load4(OptimDtype::kFloat32, from, part, half), x + 4 * half);
  }
  Rank1State::raise(state, part, x);
}

/// The states of kInt4Rank1: unsigned states have rank-1 scales, signed states are those of kInt4.
template <bool kSigned>
using Int4Rank1State = std::conditional_t<kSigned, Int4State<true>, Rank1State>;

}  // namespace reef::kernels::warp
