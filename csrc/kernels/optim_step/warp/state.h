#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/optim_step/codes.h"
#include "kernels/optim_step/fine_codes.h"
#include "kernels/optim_step/warp/part.h"

namespace reef::kernels::warp {

/// The states of each format. load() loads half of a thread's elements and value() decodes one of them;
/// seen() returns a new value as the second half of a rule sees it.
///
/// If a format has blocks, a thread has elements of kBlocks blocks, and kSharing threads share each of them.
/// keep() takes a thread's new values and finds the largest in each block; end() gets the largest values of
/// the whole blocks and writes the new values. If a format has no blocks, kBlocks is 0 and write() writes
/// half of the new values.
template <OptimDtype kDtype>
struct Uncoded {
  struct Map {};
  static Map map() { return {}; }
  static constexpr int kBlocks = 0;
  static constexpr int kSharing = kThreads;
  static constexpr int kMoreFours = 0;
  using Loaded = Four<4>;
  template <bool kWhole>
  REEF_LANE static void load(const OptimState& state, const Part<kWhole>& part, int half, Loaded& loaded) {
    loaded = load4(kDtype, state.codes, part, half);
  }
  REEF_LANE static F value(const Loaded& loaded, const Map&, int, int k) {
    return to_float(kDtype, loaded, k);
  }
  REEF_LANE static F seen(F x) { return x; }
};

template <bool kSigned>
struct Float32State : Uncoded<OptimDtype::kFloat32> {
  template <bool kWhole>
  REEF_LANE static void write(const OptimState& state, const Part<kWhole>& part, int half, std::uint32_t,
                              const F* x) {
    write4(state.codes, part, half, x);
  }
};

template <bool kSigned>
struct BFloat16State : Uncoded<OptimDtype::kBFloat16> {
  template <bool kWhole>
  REEF_LANE static void write(const OptimState& state, const Part<kWhole>& part, int half, std::uint32_t key,
                              const F* x) {
    I bits[4];
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) {
      const I random = random_bits<Lanes>(key, part.element(4 * half + k));
      bits[k] = to_bfloat16_stochastic<Lanes>(x[k], random);
    }
    write4<2>(state.codes, part, half, bits);
  }
};

/// A thread's codes of one half or, if they are packed as two 4-bit codes in a byte, of both halves.
struct Codes {
  Four<1> bytes;
  Four<1> rests;    ///< the rounding errors of both halves in compensated formats, four bits each
  float scales[4];  ///< one for each element; only the first is used if all elements have the same scale
};
REEF_LANE I nibble(std::uint32_t pair, int half) { return integer(half == 0 ? pair & 15U : pair >> 4); }
REEF_LANE Four<1> paired(const Four<1> (&of)[2]) { return {{of[0].words[0] | of[1].words[0] << 4}}; }

template <class Code, bool kSigned, bool kCompensated>
struct CodedState {
  using Map = typename Code::Map;
  using Loaded = Codes;
  static decltype(auto) map() { return Code::map(); }
  static constexpr bool kPacked = Code::kBits == 4;
  static constexpr int kBlocks = Code::kBlock == kTileElements ? 1 : 2;
  static constexpr int kSharing = Code::kBlock < 4 * kThreads ? Code::kBlock / 4 : kThreads;
  /// How many groups of four registers are needed besides those for the states.
  static constexpr int kMoreFours = kCompensated ? 2 : Code::kBlock < 4 * kThreads ? 1 : 0;

  template <bool kWhole>
  REEF_LANE static void load(const OptimState& state, const Part<kWhole>& part, int half, Codes& codes) {
    if (half == 0 || !kPacked) codes.bytes = load4<1>(state.codes, at(part, half), part, half);
    if (half == 0 && kCompensated) codes.rests = load4<1>(state.codes, rests_at(part), part, 0);
    if (half == 0 || kBlocks == 2) codes.scales[0] = scale(state, part, half);
  }

  REEF_LANE static F value(const Codes& codes, const Map& map, int half, int k) {
    const Code code(map);
    I byte = kPacked ? nibble(codes.bytes[k], half) : integer(codes.bytes[k]);
    if constexpr (kCompensated) byte = scalar::shift_left<4>(byte) | nibble(codes.rests[k], half);
    return code.decode(byte, code.unit(codes.scales[0]));
  }

  // Replaces an infinity (a square that overflowed) by the largest float.
  REEF_LANE static F seen(F x) { return max(min(x, F{FLT_MAX}), F{-FLT_MAX}); }

  REEF_LANE static void keep(F (&x)[kOwn], float* largest) {
    REEF_UNROLL
    for (int block = 0; block < kBlocks; ++block) largest[block] = 0;
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      x[k] = Code::kept(x[k]);
      float& most = largest[kBlocks == 1 ? 0 : k / 4];
      most = scalar::max_size(F{most}, x[k]).v;
    }
  }

  template <bool kWhole>
  REEF_LANE static void end(const OptimState& state, const Part<kWhole>& part, const Map& map,
                            [[maybe_unused]] std::uint32_t key, const float* largest, F (&x)[kOwn]) {
    const Code code(map);
    Four<1> bytes[2]{}, rests[2]{};
    F units[2];
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (half == kBlocks) {  // Both halves are in the same block.
        units[half] = units[0];
        break;
      }
      const F scale = Code::scale(min(F{largest[half]}, F{FLT_MAX}));
      units[half] = F{Code::kUnits} / max(scale, F{FLT_MIN * Code::kUnits});
      put_scale(state, part, half, scale.v);
    }
    REEF_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int half = i % 2;  // Halves alternate, because two elements share their random bits.
      const int k = i / 2;
      const F own = seen(x[4 * half + k]);
      if constexpr (kCompensated) {
        const I drawn = random_bits<Lanes>(key, part.element(k));  // 16 bits for each half
        const I random = half == 0 ? drawn & I{0xFFFF} : scalar::shift_right<16>(drawn);
        const std::uint32_t number = scalar::raw(code.number(own, units[half], to_floats(random)));
        bytes[half].put(k, number >> 4 & 0xFFU);
        rests[half].put(k, number & 15U);
      } else {
        const I added = code.code(code.find(own, units[half])) + I{Code::kAdded};
        bytes[half].put(k, scalar::raw(max(min(added, I{255}), I{0})));
      }
    }
    if constexpr (kCompensated) store4(state.codes, rests_at(part), part, 0, paired(rests));
    if constexpr (kPacked) {
      store4(state.codes, at(part, 0), part, 0, paired(bytes));
    } else {
      store4(state.codes, at(part, 0), part, 0, bytes[0]);
      store4(state.codes, at(part, 1), part, 1, bytes[1]);
    }
  }

 private:
  static constexpr int kBytes = static_cast<int>(kTileElements) * Code::kBits / 8;
  // at() returns the position of the four codes of a half, or of both halves if they are packed; rests_at()
  // that of their rounding errors, which follow all codes of the tile.
  template <bool kWhole>
  REEF_LANE static std::int64_t at(const Part<kWhole>& part, int half) {
    const std::int64_t begin = part.tile * (kBytes + (kCompensated ? kHalf : 0));
    return begin + (kPacked ? 4 * part.thread : part.element(4 * half));
  }
  template <bool kWhole>
  REEF_LANE static std::int64_t rests_at(const Part<kWhole>& part) {
    const int codes = part.elements < kBytes ? part.elements : kBytes;
    return part.tile * (kBytes + kHalf) + codes + 4 * part.thread;
  }

  template <bool kWhole>
  REEF_LANE static int block_of(const Part<kWhole>& part, int half) {
    return part.element(4 * half) / Code::kBlock;
  }
  template <bool kWhole>
  REEF_LANE static bool is_there(const Part<kWhole>& part, int half) {
    return kWhole || block_of(part, half) * Code::kBlock < part.elements;
  }
  template <bool kWhole>
  REEF_LANE static typename Code::Scale* scale_at(const OptimState& state, const Part<kWhole>& part,
                                                  int half) {
    constexpr int kOfTile = static_cast<int>(kTileElements) / Code::kBlock;
    return global(reinterpret_cast<typename Code::Scale*>(state.scales)) + part.tile * kOfTile +
           block_of(part, half);
  }
  template <bool kWhole>
  REEF_LANE static float scale(const OptimState& state, const Part<kWhole>& part, int half) {
    if (!is_there(part, half)) return 0;
    if constexpr (sizeof(typename Code::Scale) == sizeof(float)) {
      return *scale_at(state, part, half);
    } else {
      return floats_of_bits(I{*scale_at(state, part, half) << 16}).v;
    }
  }
  // Writes the scale of a block, in the one thread that has the block's first element.
  template <bool kWhole>
  REEF_LANE static void put_scale(const OptimState& state, const Part<kWhole>& part, int half, float scale) {
    if (part.element(4 * half) % Code::kBlock != 0 || !is_there(part, half)) return;
    if constexpr (sizeof(typename Code::Scale) == sizeof(float)) {
      *scale_at(state, part, half) = scale;
    } else {
      *scale_at(state, part, half) = static_cast<std::uint16_t>(scalar::shift_right<16>(bits_of(F{scale})).v);
    }
  }
};

template <bool kSigned>
using Int8State = CodedState<Int8Code<Lanes, kSigned>, kSigned, false>;
template <bool kSigned>
using Int4State = CodedState<Int4Code<Lanes, kSigned>, kSigned, false>;
template <bool kSigned>
using Companded8State = CodedState<Companded8Code<Lanes, kSigned>, kSigned, false>;
template <bool kSigned>
using Int8CompensatedState = CodedState<Int8FineCode<Lanes, kSigned>, kSigned, true>;
template <bool kSigned>
using Int4CompensatedState = CodedState<Int4FineCode<Lanes, kSigned>, kSigned, true>;
template <bool kSigned>
using Companded8CompensatedState = CodedState<Companded8FineCode<Lanes, kSigned>, kSigned, true>;

/// The tables of a format's signed and unsigned states.
template <template <bool> class State>
struct Maps {
  typename State<true>::Map of_signed;
  typename State<false>::Map of_unsigned;
  static Maps all() { return {State<true>::map(), State<false>::map()}; }
  template <bool kSigned>
  REEF_LANE const auto& of() const {
    if constexpr (kSigned) {
      return of_signed;
    } else {
      return of_unsigned;
    }
  }
};

/// Encodes one thread's part of a tile of values to a state.
template <template <bool> class State, bool kSigned, bool kWhole>
class Encode {
 public:
  using Of = State<kSigned>;
  REEF_LANE Encode(const float* values, const OptimState& state, const Part<kWhole>& part,
                   const typename Of::Map& map)
      : state_(state), part_(part), map_(map) {
    const auto* const from = reinterpret_cast<const std::byte*>(values);
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      to_floats(OptimDtype::kFloat32, load4(OptimDtype::kFloat32, from, part, half), x_ + 4 * half);
    }
  }
  REEF_LANE void begin(float* largest) {
    if constexpr (Of::kBlocks > 0) Of::keep(x_, largest);
  }
  REEF_LANE void end([[maybe_unused]] const float* largest) {
    const std::uint32_t key = key_of_encoded(state_, part_.tile);
    if constexpr (Of::kBlocks > 0) {
      Of::end(state_, part_, map_, key, largest, x_);
    } else {
      REEF_UNROLL
      for (int half = 0; half < 2; ++half) Of::write(state_, part_, half, key, x_ + 4 * half);
    }
  }

 private:
  const OptimState& state_;
  const Part<kWhole> part_;
  const typename Of::Map& map_;
  F x_[kOwn];
};

/// Decodes one thread's part of a tile of a state to values.
template <template <bool> class State, bool kSigned, bool kWhole>
REEF_LANE void decode(const OptimState& state, float* values, const Part<kWhole>& part,
                      const typename State<kSigned>::Map& map) {
  using Of = State<kSigned>;
  typename Of::Loaded loaded;
  REEF_UNROLL
  for (int half = 0; half < 2; ++half) {
    F x[4];
    Of::load(state, part, half, loaded);
    REEF_UNROLL
    for (int k = 0; k < 4; ++k) x[k] = Of::value(loaded, map, half, k);
    write4(reinterpret_cast<std::byte*>(values), part, half, x);
  }
}

}  // namespace reef::kernels::warp
