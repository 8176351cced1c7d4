#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codes.h"
#include "kernels/optim_step/fine_codes.h"
#include "kernels/optim_step/prefetch.h"
#include "kernels/optim_step/rounding.h"

/// How a tile of a state is read and written, by format. A codec is opened on a tile; load(i) decodes the
/// lanes from element i on. Where a format has no scales, put(i, x) writes their new values.
///
/// A format with scales (kSettles) cannot write anything before it knows the largest value of a block. Its
/// put(i, x) takes the new values of lanes and of the three after them, and keeps them; waiting(i) gives them
/// back. close() says that the tile is complete. Then find(i) begins to look for the codes of lanes and
/// code() ends it, so that a processor can work on one half for some lanes and on the other half for others;
/// store(i, codes) writes the codes of lanes and of the three after them. encode() does all of this for
/// values in memory. Values must not be NaN.
namespace reef::kernels {

template <class L, int kBytes>
void prefetch_tile(const std::uint8_t* codes) {
  for (int i = 0; i < kBytes; i += 64) L::prefetch(codes + i, kPrefetchBytes);
}

template <class L, bool kSigned>
class Float32Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = false;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    values_ = reinterpret_cast<float*>(state.codes) + tile * kTileElements;
  }
  F load(int i) const {
    L::prefetch(values_ + i, prefetch_bytes);
    return L::load(values_ + i);
  }
  void put(int i, F x) { L::store(values_ + i, x); }

 private:
  float* values_ = nullptr;
};

/// Rounded by chance: a moving average that changes by less than half of the last place would stand still.
template <class L, bool kSigned>
class BFloat16Codec {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = false;
  void open(const OptimState& state, std::int64_t tile, std::uint32_t key) {
    values_ = reinterpret_cast<std::uint16_t*>(state.codes) + tile * kTileElements;
    key_ = key;
  }
  F load(int i) const {
    L::prefetch(values_ + i, prefetch_bytes);
    return floats_of_bits(shift_left<16>(L::load_halves(values_ + i)));
  }
  void put(int i, F x) {
    L::store_halves(values_ + i, to_bfloat16_stochastic<L>(x, random_bits<L>(key_, i)));
  }

 private:
  std::uint16_t* values_ = nullptr;
  std::uint32_t key_ = 0;
};

/// The scales of the blocks of a tile, made of their largest values.
template <class L, int kBlockElements, bool kSigned>
class Blocks {
 public:
  using F = typename L::Floats;
  static constexpr int kBlocks = kTileElements / kBlockElements;

  /// New values of lanes and of the three after them.
  void put(int i, const F (&x)[4]) {
    for (int k = 0; k < 4; k += kPartLanes) {
      F largest = kSigned ? abs(x[k]) : x[k];
      for (int m = 1; m < kPartLanes; ++m)
        largest = kSigned ? max_size(largest, x[k + m]) : max(largest, x[k + m]);
      largest_[i / kPart + k / kPartLanes] = largest;
    }
  }

  /// The tile is whole. The largest value of each block, rounded up by `round`, is its scale. Values will be
  /// counted in so many units of it. Returns whether a value is an infinity (a square that overflowed), which
  /// is to become the largest float.
  template <class Round>
  bool close(float units, const Round& round) {
    constexpr int kOfBlock = kBlockElements / kPart;
    F of_blocks[kBlocks];
    for (int block = 0; block < kBlocks; ++block) {
      of_blocks[block] = largest_[block * kOfBlock];
      for (int k = 1; k < kOfBlock; ++k) {
        of_blocks[block] = max(of_blocks[block], largest_[block * kOfBlock + k]);
      }
    }
    F packed[kPacked];
    L::largest(of_blocks, packed);
    bool overflowed = false;
    for (int i = 0; i < kPacked; ++i) {
      overflowed |= !all(L::all(FLT_MAX) >= packed[i]);
      const F scale = round(min(packed[i], L::all(FLT_MAX)));
      L::store(scales_ + i * L::kLanes, scale);
      L::store(units_ + i * L::kLanes, L::all(units) / max(scale, L::all(FLT_MIN * units)));
    }
    return overflowed;
  }
  const float* scales() const { return scales_; }
  const float* units() const { return units_; }

 private:
  // Largest values are kept for parts of blocks: four lanes, or less.
  static constexpr int kPart = kBlockElements < 4 * L::kLanes ? kBlockElements : 4 * L::kLanes;
  static constexpr int kPartLanes = kPart / L::kLanes;
  // Scales are made for as many blocks at once as there are lanes.
  static constexpr int kPacked = (kBlocks + L::kLanes - 1) / L::kLanes;

  F largest_[kTileElements / kPart];
  alignas(64) float scales_[kPacked * L::kLanes];
  alignas(64) float units_[kPacked * L::kLanes];
};

/// Infinities become the largest float. `to` may be `from`.
template <class L>
void limit(const float* from, float* to) {
  for (int i = 0; i < kTileElements; i += L::kLanes) {
    L::store(to + i, max(min(L::load(from + i), L::all(FLT_MAX)), L::all(-FLT_MAX)));
  }
}

/// A state of codes, and a scale for each block. Of 4 bits there are two codes a byte: of elements 0 to 127
/// of a tile in the low halves, of 128 to 255 in the high ones, so that each half is a block of its own.
template <class L, class Code, bool kSigned>
class CodedState {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  static constexpr bool kSettles = true;
  static constexpr bool kLooksUp = Code::kLooksUp;  ///< in tables, which take registers

  void open(const OptimState& state, std::int64_t tile, std::uint32_t) { open_at(state, tile, kBytes); }
  F load(int i) const { return code_.decode(code_at(i), unit_[i / Code::kBlock]); }
  void put(int i, const F (&x)[4]) {
    const F kept[4] = {Code::kept(x[0]), Code::kept(x[1]), Code::kept(x[2]), Code::kept(x[3])};
    for (int k = 0; k < 4; ++k) L::store(new_ + i + k * L::kLanes, kept[k]);
    blocks_.put(i, kept);
  }
  F waiting(int i) const { return L::load(new_ + i); }
  void close() {
    if (blocks_.close(Code::kUnits, &Code::scale)) limit<L>(new_, new_);
    put_scales();
  }
  auto find(int i) const { return find(code_, new_, blocks_.units(), i); }
  template <class Found>
  I code(const Found& found) const {
    if constexpr (kPacked) {
      return found;
    } else {
      return code_.code(found);
    }
  }
  void store(int i, const I (&codes)[4]) {
    if (i < kBytes) L::template store_bytes<Code::kAdded>(codes_ + i, codes);
  }

  /// All of this at once, for the new values of a whole tile.
  void encode(const float* from) {
    encode(from, [this](const float* values) { write(values); });
  }

 protected:
  template <class Write>
  void encode(const float* from, const Write& write_codes) {
    alignas(64) float side[kTileElements];
    for (int i = 0; i < kTileElements; i += 4 * L::kLanes) {
      F kept[4];
      for (int k = 0; k < 4; ++k) {
        kept[k] = Code::kept(L::load(from + i + k * L::kLanes));
        if constexpr (!Code::kKeepsValues) L::store(side + i + k * L::kLanes, kept[k]);
      }
      blocks_.put(i, kept);
    }
    const float* const kept = Code::kKeepsValues ? from : side;
    const bool overflowed = blocks_.close(Code::kUnits, &Code::scale);
    if (overflowed) limit<L>(kept, side);
    put_scales();
    write_codes(overflowed ? side : kept);
  }

  using Scale = typename Code::Scale;
  static constexpr bool kPacked = Code::kBits == 4;
  static constexpr int kBytes = kTileElements * Code::kBits / 8;
  static constexpr int kBlocks = kTileElements / Code::kBlock;

  void open_at(const OptimState& state, std::int64_t tile, int tile_bytes) {
    codes_ = reinterpret_cast<std::uint8_t*>(state.codes) + tile * tile_bytes;
    scales_ = reinterpret_cast<Scale*>(state.scales) + tile * kBlocks;
    prefetch_tile<L, kBytes>(codes_);
    for (int block = 0; block < kBlocks; ++block) unit_[block] = code_.unit(as_float(scales_[block]));
  }
  I code_at(int i) const {
    const I code = L::load_bytes(codes_ + i % kBytes);
    if constexpr (kPacked) return i < kBytes ? code & L::all(15) : shift_right<4>(code);
    return code;
  }

  // What code() takes; of 4 bits, two codes already, or nothing where another element has it.
  static auto find(const Code& code, const float* values, const float* units, int i) {
    const auto found = [&](int at) {
      return code.find(L::load(values + at), L::all(units[at / Code::kBlock]));
    };
    if constexpr (!kPacked) {
      return found(i);
    } else {
      if (i >= kBytes) return L::all(0);
      return code.code(found(i)) | shift_left<4>(code.code(found(i + kBytes)));
    }
  }

  void write(const float* values) const {
    for (int i = 0; i < kBytes; i += 4 * L::kLanes) {
      I codes[4];
      for (int k = 0; k < 4; ++k) codes[k] = code(find(code_, values, blocks_.units(), i + k * L::kLanes));
      L::template store_bytes<Code::kAdded>(codes_ + i, codes);
    }
  }

  void put_scales() {
    for (int block = 0; block < kBlocks; ++block) put_scale(scales_[block], blocks_.scales()[block]);
  }

  static float as_float(float scale) { return scale; }
  static float as_float(std::uint16_t scale) {  // a bfloat16
    const std::uint32_t bits = std::uint32_t{scale} << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static void put_scale(float& to, float scale) { to = scale; }
  static void put_scale(std::uint16_t& to, float scale) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &scale, sizeof bits);
    to = static_cast<std::uint16_t>(bits >> 16);
  }

  Code code_{Code::map()};
  std::uint8_t* codes_ = nullptr;
  Scale* scales_ = nullptr;
  typename Code::Unit unit_[kBlocks];  ///< of what is decoded
  Blocks<L, Code::kBlock, kSigned> blocks_;
  alignas(64) float new_[kTileElements];
};

/// And four bits of what a code's rounding lost, two elements a byte as codes of four bits. All of it is
/// written when the tile is closed.
template <class L, class FineCode, bool kSigned>
class CompensatedState : public CodedState<L, FineCode, kSigned> {
  using Base = CodedState<L, FineCode, kSigned>;

 public:
  using F = typename L::Floats;
  using I = typename L::Ints;

  void open(const OptimState& state, std::int64_t tile, std::uint32_t key) {
    key_ = key;
    Base::open_at(state, tile, Base::kBytes + kHalf);
    prefetch_tile<L, kHalf>(rests());
  }
  F load(int i) const {
    const I pair = L::load_bytes(rests() + i % kHalf);
    const I rest = i < kHalf ? pair & L::all(15) : shift_right<4>(pair);
    return Base::code_.decode(shift_left<4>(Base::code_at(i)) | rest, Base::unit_[i / FineCode::kBlock]);
  }
  void close() {
    Base::close();
    write(Base::codes_, Base::new_, Base::blocks_.units(), key_);
  }
  void encode(const float* from) {
    Base::encode(from,
                 [this](const float* values) { write(Base::codes_, values, Base::blocks_.units(), key_); });
  }
  I find(int) const { return L::all(0); }
  I code(I found) const { return found; }
  void store(int, const I (&)[4]) {}

 private:
  static constexpr int kHalf = kTileElements / 2;

  std::uint8_t* rests() const { return Base::codes_ + Base::kBytes; }

  // A function of its own, for nothing else of a step could be done beside it.
  [[gnu::noinline, REEF_FLAT]] static void write(std::uint8_t* codes, const float* values, const float* units,
                                                 std::uint32_t key) {
    const FineCode code(FineCode::map());
    const auto number = [&](int i, I drawn) {
      const F unit = L::all(units[i / FineCode::kBlock]);
      return code.number(L::load(values + i), unit, to_floats(drawn));
    };
    for (int i = 0; i < kHalf; i += 4 * L::kLanes) {
      I low[4], high[4], rest[4];
      for (int k = 0; k < 4; ++k) {
        const int at = i + k * L::kLanes;
        const I random = random_bits<L>(key, at);  // sixteen bits for each
        low[k] = number(at, random & L::all(0xFFFF));
        high[k] = number(at + kHalf, shift_right<16>(random));
        rest[k] = (low[k] & L::all(15)) | shift_left<4>(high[k] & L::all(15));
        low[k] = shift_right<4>(low[k]);
        high[k] = shift_right<4>(high[k]);
        if constexpr (Base::kPacked) low[k] = low[k] | shift_left<4>(high[k]);
      }
      L::template store_bytes<0>(codes + i, low);
      if constexpr (!Base::kPacked) L::template store_bytes<0>(codes + kHalf + i, high);
      L::template store_bytes<0>(codes + Base::kBytes + i, rest);
    }
  }

  std::uint32_t key_ = 0;
};

template <class L, bool kSigned>
using Int8Codec = CodedState<L, Int8Code<L, kSigned>, kSigned>;
template <class L, bool kSigned>
using Int4Codec = CodedState<L, Int4Code<L, kSigned>, kSigned>;
template <class L, bool kSigned>
using Companded8Codec = CodedState<L, Companded8Code<L, kSigned>, kSigned>;
template <class L, bool kSigned>
using Int8CompensatedCodec = CompensatedState<L, Int8FineCode<L, kSigned>, kSigned>;
template <class L, bool kSigned>
using Int4CompensatedCodec = CompensatedState<L, Int4FineCode<L, kSigned>, kSigned>;
template <class L, bool kSigned>
using Companded8CompensatedCodec = CompensatedState<L, Companded8FineCode<L, kSigned>, kSigned>;

}  // namespace reef::kernels
