#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codes.h"
#include "kernels/optim_step/fine_codes.h"
#include "kernels/optim_step/prefetch.h"
#include "kernels/optim_step/rounding.h"

/// Codecs: how the tiles of a state are read and written in each format. open() selects a tile; load(i)
/// decodes one vector of lanes, which begins at element i. If a format has no scales, put(i, x) writes a
/// vector of new values.
///
/// A format with scales (kSettles) cannot encode anything before it knows the largest value of each block.
/// Its put(i, x) takes four consecutive vectors of new values and buffers them; waiting(i) returns one of
/// them. close() is called when the tile is complete. After that, the code of a value is computed in two
/// halves, find(i) and code(found), so that a processor can work on the first half for some lanes and on the
/// second for others; store(i, codes) writes the codes of four consecutive vectors. encode() does all of this
/// for a tile of values in memory. Values must not be NaN.
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

/// Rounds stochastically. With rounding to nearest, a moving average that changes by less than half a unit in
/// the last place would never change.
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

/// Computes the scale of each block of a tile from the block's largest value.
template <class L, int kBlockElements, bool kSigned>
class Blocks {
 public:
  using F = typename L::Floats;
  static constexpr int kBlocks = kTileElements / kBlockElements;

  /// Takes four consecutive vectors of new values.
  void put(int i, const F (&x)[4]) {
    for (int k = 0; k < 4; k += kPartLanes) {
      F largest = kSigned ? abs(x[k]) : x[k];
      for (int m = 1; m < kPartLanes; ++m)
        largest = kSigned ? max_size(largest, x[k + m]) : max(largest, x[k + m]);
      largest_[i / kPart + k / kPartLanes] = largest;
    }
  }

  /// Computes the scales when all values of the tile have been put: the scale of a block is its largest
  /// value, rounded up by `round`, and is divided into `units` units, in which values are encoded. Returns
  /// whether any value is infinite (a square that overflowed); the caller then replaces infinities by the
  /// largest float.
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
  // The largest values are kept for parts of blocks. A part is four vectors, or a whole block if that is
  // less.
  static constexpr int kPart = kBlockElements < 4 * L::kLanes ? kBlockElements : 4 * L::kLanes;
  static constexpr int kPartLanes = kPart / L::kLanes;
  // The number of vectors that hold one value for each block.
  static constexpr int kPacked = (kBlocks + L::kLanes - 1) / L::kLanes;

  F largest_[kTileElements / kPart];
  alignas(64) float scales_[kPacked * L::kLanes];
  alignas(64) float units_[kPacked * L::kLanes];
};

/// Copies a tile and replaces infinities by the largest float of their sign. `to` may be `from`.
template <class L>
void limit(const float* from, float* to) {
  for (int i = 0; i < kTileElements; i += L::kLanes) {
    L::store(to + i, max(min(L::load(from + i), L::all(FLT_MAX)), L::all(-FLT_MAX)));
  }
}

/// A state that consists of codes and a scale for each block. 4-bit codes are packed in pairs: the low halves
/// of a tile's bytes hold elements 0 to 127, the high halves elements 128 to 255. Each range is one block.
template <class L, class Code, bool kSigned>
class CodedState {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  static constexpr bool kSettles = true;
  static constexpr bool kLooksUp = Code::kLooksUp;  ///< whether it uses tables, which take registers

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

  /// Puts, closes and stores a whole tile of new values.
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

  // Returns what code() takes. For 4-bit codes this is already a byte of two codes, or 0 for elements from
  // kBytes on, because the byte of element i - kBytes includes the code of element i.
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
  static float as_float(std::uint16_t scale) {  // The bits of a bfloat16.
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
  typename Code::Unit unit_[kBlocks];  ///< the units in which the old values are decoded
  Blocks<L, Code::kBlock, kSigned> blocks_;
  alignas(64) float new_[kTileElements];
};

/// A state that also keeps four bits of each code's rounding error, packed in pairs like 4-bit codes. All
/// codes and errors are written when the tile is closed.
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

  // Not inlined: no other work of a step could overlap with this loop.
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
        const I random = random_bits<L>(key, at);  // 16 bits for each of the two elements
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
