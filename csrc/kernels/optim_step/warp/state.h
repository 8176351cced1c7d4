#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/optim_step/codes.h"
#include "kernels/optim_step/fine_codes.h"
#include "kernels/optim_step/warp/part.h"

namespace reef::kernels::warp {

/// States, by format. begin() gives a thread's values; keep() takes new ones and says the largest of each of
/// the kBlocks blocks that the thread has elements of, which kSharing threads share; end() writes what was
/// kept, when it knows the largest of the whole blocks, and leaves in x what the rule's second half is to
/// see.
struct Uncoded {
  struct Map {};
  static Map map() { return {}; }
  static constexpr int kBlocks = 0;
  static constexpr int kSharing = kThreads;
  REEF_LANE static void keep(F (&)[kOwn], float*) {}
};

template <bool kSigned>
struct Float32State : Uncoded {
  REEF_LANE static void begin(const OptimState& state, const Part& part, const Map&, F (&x)[kOwn]) {
    read(OptimDtype::kFloat32, state.codes, part, x);
  }
  REEF_LANE static void end(const OptimState& state, const Part& part, const Map&, std::uint32_t,
                            const float*, F (&x)[kOwn]) {
    write32(state.codes, part, x);
  }
};

template <bool kSigned>
struct BFloat16State : Uncoded {
  REEF_LANE static void begin(const OptimState& state, const Part& part, const Map&, F (&x)[kOwn]) {
    read(OptimDtype::kBFloat16, state.codes, part, x);
  }
  REEF_LANE static void end(const OptimState& state, const Part& part, const Map&, std::uint32_t key,
                            const float*, F (&x)[kOwn]) {
    I halves[kOwn];
    REEF_UNROLL
    for (int k = 0; k < kOwn; ++k) {
      halves[k] = to_bfloat16_stochastic<Lanes>(x[k], random_bits<Lanes>(key, part.element(k)));
    }
    write_bits<std::uint16_t>(state.codes, part, halves);
  }
};

/// Of elements of both halves, two 4-bit codes a byte.
REEF_LANE I nibble(I pair, int half) { return half == 0 ? pair & I{15} : scalar::shift_right<4>(pair); }
REEF_LANE Four<std::uint8_t> paired(const Four<std::uint8_t> (&of)[2]) {
  Four<std::uint8_t> pairs;
  REEF_UNROLL
  for (int k = 0; k < 4; ++k) pairs.v[k] = static_cast<std::uint8_t>(of[0].v[k] | of[1].v[k] << 4);
  return pairs;
}

template <class Code, bool kSigned, bool kCompensated>
struct CodedState {
  using Map = typename Code::Map;
  static decltype(auto) map() { return Code::map(); }
  static constexpr bool kPacked = Code::kBits == 4;
  static constexpr int kBlocks = Code::kBlock == kTileElements ? 1 : 2;
  static constexpr int kSharing = Code::kBlock < 4 * kThreads ? Code::kBlock / 4 : kThreads;

  REEF_LANE static void begin(const OptimState& state, const Part& part, const Map& map, F (&x)[kOwn]) {
    const Code code(map);
    const auto low = load4<std::uint8_t>(state.codes, at(part, 0), part.there(0));
    const auto high = kPacked ? low : load4<std::uint8_t>(state.codes, at(part, 1), part.there(1));
    Four<std::uint8_t> pairs{};
    if constexpr (kCompensated) pairs = load4<std::uint8_t>(state.codes, rests_at(part), part.there(0));
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const auto unit = code.unit(scale(state, part, half));
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) {
        I byte{half == 0 ? low.v[k] : high.v[k]};
        if constexpr (kPacked) byte = nibble(byte, half);
        if constexpr (kCompensated) byte = scalar::shift_left<4>(byte) | nibble(I{pairs.v[k]}, half);
        x[4 * half + k] = code.decode(byte, unit);
      }
    }
  }

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

  REEF_LANE static void end(const OptimState& state, const Part& part, const Map& map,
                            [[maybe_unused]] std::uint32_t key, const float* largest, F (&x)[kOwn]) {
    const Code code(map);
    const F limit{FLT_MAX};  // an infinity (a square that overflowed) becomes the largest float
    Four<std::uint8_t> bytes[2], rests[2];
    REEF_UNROLL
    for (int half = 0; half < 2; ++half) {
      const F scale = Code::scale(min(F{largest[kBlocks == 1 ? 0 : half]}, limit));
      const F units = F{Code::kUnits} / max(scale, F{FLT_MIN * Code::kUnits});
      put_scale(state, part, half, scale.v);
      REEF_UNROLL
      for (int k = 0; k < 4; ++k) {
        F& own = x[4 * half + k];
        own = max(min(own, limit), F{-FLT_MAX});
        if constexpr (kCompensated) {
          const I drawn = random_bits<Lanes>(key, part.element(k));  // sixteen bits for each half
          const I random = half == 0 ? drawn & I{0xFFFF} : scalar::shift_right<16>(drawn);
          const I number = code.number(own, units, to_floats(random));
          bytes[half].v[k] = static_cast<std::uint8_t>(number.v >> 4);
          rests[half].v[k] = static_cast<std::uint8_t>(number.v & 15);
        } else {
          const I added = code.code(code.find(own, units)) + I{Code::kAdded};
          bytes[half].v[k] = static_cast<std::uint8_t>(max(min(added, I{255}), I{0}).v);
        }
      }
    }
    if constexpr (kCompensated) store4(state.codes, rests_at(part), part.there(0), paired(rests));
    if constexpr (kPacked) {
      store4(state.codes, at(part, 0), part.there(0), paired(bytes));
    } else {
      store4(state.codes, at(part, 0), part.there(0), bytes[0]);
      store4(state.codes, at(part, 1), part.there(1), bytes[1]);
    }
  }

 private:
  static constexpr int kBytes = static_cast<int>(kTileElements) * Code::kBits / 8;
  // Where the four codes in a half are; packed, there is one half. And where their rests are, after all
  // codes.
  REEF_LANE static std::int64_t at(const Part& part, int half) {
    const std::int64_t begin = part.tile * (kBytes + (kCompensated ? kHalf : 0));
    return begin + (kPacked ? 4 * part.thread : part.element(4 * half));
  }
  REEF_LANE static std::int64_t rests_at(const Part& part) {
    const int codes = part.elements < kBytes ? part.elements : kBytes;
    return part.tile * (kBytes + kHalf) + codes + 4 * part.thread;
  }

  REEF_LANE static int block_of(const Part& part, int half) { return part.element(4 * half) / Code::kBlock; }
  REEF_LANE static bool is_there(const Part& part, int half) {
    return block_of(part, half) * Code::kBlock < part.elements;
  }
  REEF_LANE static typename Code::Scale* scale_at(const OptimState& state, const Part& part, int half) {
    constexpr int kOfTile = static_cast<int>(kTileElements) / Code::kBlock;
    return reinterpret_cast<typename Code::Scale*>(state.scales) + part.tile * kOfTile + block_of(part, half);
  }
  REEF_LANE static float scale(const OptimState& state, const Part& part, int half) {
    if (!is_there(part, half)) return 0;
    if constexpr (sizeof(typename Code::Scale) == sizeof(float)) {
      return *scale_at(state, part, half);
    } else {
      return floats_of_bits(I{*scale_at(state, part, half) << 16}).v;
    }
  }
  // One thread of a block writes its scale.
  REEF_LANE static void put_scale(const OptimState& state, const Part& part, int half, float scale) {
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

/// One thread's part of a tile of values that become a state.
template <template <bool> class State, bool kSigned>
class Encode {
 public:
  using Of = State<kSigned>;
  REEF_LANE Encode(const float* values, const OptimState& state, const Part& part,
                   const typename Of::Map& map)
      : state_(state), part_(part), map_(map) {
    read(OptimDtype::kFloat32, reinterpret_cast<const std::byte*>(values), part, x_);
  }
  REEF_LANE void begin(float* largest) { Of::keep(x_, largest); }
  REEF_LANE void end(const float* largest) {
    Of::end(state_, part_, map_, key_of_encoded(state_, part_.tile), largest, x_);
  }

 private:
  const OptimState& state_;
  const Part part_;
  const typename Of::Map& map_;
  F x_[kOwn];
};

/// And back.
template <template <bool> class State, bool kSigned>
REEF_LANE void decode(const OptimState& state, float* values, const Part& part,
                      const typename State<kSigned>::Map& map) {
  F x[kOwn];
  State<kSigned>::begin(state, part, map, x);
  write32(reinterpret_cast<std::byte*>(values), part, x);
}

}  // namespace reef::kernels::warp
