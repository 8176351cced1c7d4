#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/optim_step/side.h"

/// Functions that encode and decode whole tiles of floats, compiled once for each format and signedness.
namespace reef::kernels {

/// Points to the values of a tile, or, if the tile is not whole, to a copy that is padded with zeros. It is a
/// template on the lanes so that the linker never picks a copy of its code that was compiled for another
/// instruction set.
template <class L>
class PaddedValues {
 public:
  PaddedValues(const float* from, std::int64_t elements) : data(from) {
    if (elements == kTileElements) return;
    std::fill(std::copy_n(from, elements, side_), side_ + kTileElements, 0.0F);
    data = side_;
  }
  PaddedValues(const PaddedValues&) = delete;
  PaddedValues& operator=(const PaddedValues&) = delete;
  const float* data;

 private:
  alignas(64) float side_[kTileElements];
};

/// Opens a codec on a tile and prepares it for load().
template <class Codec>
void open_to_load(Codec& codec, const OptimState& state, std::int64_t tile, std::uint32_t key) {
  codec.open(state, tile, key);
  if constexpr (requires { codec.read_scales(); }) codec.read_scales();
}

/// Decodes a tile. `to` must have room for a whole tile.
template <class L, class Codec>
[[gnu::noinline, REEF_FLAT]] void decode_tile(const OptimState& state, std::int64_t tile, std::uint32_t key,
                                              float* to) {
  Codec codec;
  open_to_load(codec, state, tile, key);
  for (int i = 0; i < kTileElements; i += L::kLanes) L::store(to + i, codec.load(i));
}

/// Encodes `elements` values of a tile. `state` must have room for a whole tile; the rest is encoded as
/// zeros.
template <class L, class Codec>
[[gnu::noinline, REEF_FLAT]] void encode_tile(const OptimState& state, std::int64_t tile, std::uint32_t key,
                                              const float* from, std::int64_t elements) {
  Codec codec;
  codec.open(state, tile, key);
  const PaddedValues<L> values(from, elements);
  if constexpr (Codec::kSettles) {
    codec.encode(values.data);
  } else {
    for (int i = 0; i < kTileElements; i += L::kLanes) {
      codec.put(i, L::load(values.data + i));
    }
  }
}

/// Raises the new scales to what the values of a tile need, for a format whose scales depend on all values of
/// a tensor.
template <class L, class Codec>
[[gnu::noinline, REEF_FLAT]] void survey_tile(const OptimState& state, std::int64_t tile, const float* from,
                                              std::int64_t elements) {
  Codec codec;
  codec.open(state, tile, 0);
  const PaddedValues<L> values(from, elements);
  codec.raise(values.data, nullptr);
}

/// Encodes values to a state in a format, and decodes them.
template <class L, template <class, bool> class CodecOf, OptimFormat kFormat, bool kSigned>
struct Coder {
  using Codec = CodecOf<L, kSigned>;

  static void encode(const float* values, const OptimState& state, std::int64_t elements, std::int64_t first,
                     std::int64_t last) {
    each(state, elements, first, last, [&](const OptimState& of, std::int64_t at, std::int64_t tile) {
      const std::int64_t begin = tile * kTileElements;
      for (int i = 0; i < kTileElements; i += 16) L::prefetch(values + begin + i, kPrefetchBytes);
      encode_tile<L, Codec>(of, at, key_of_encoded(state, tile), values + begin,
                            std::min(kTileElements, elements - begin));
    });
  }

  static void survey(const float* values, const OptimState& state, std::int64_t elements, std::int64_t first,
                     std::int64_t last) {
    each(state, elements, first, last, [&](const OptimState& of, std::int64_t at, std::int64_t tile) {
      const std::int64_t begin = tile * kTileElements;
      survey_tile<L, Codec>(of, at, values + begin, std::min(kTileElements, elements - begin));
    });
  }

  static void decode(const OptimState& state, float* values, std::int64_t elements, std::int64_t first,
                     std::int64_t last) {
    each(state, elements, first, last, [&](const OptimState& of, std::int64_t at, std::int64_t tile) {
      const std::int64_t begin = tile * kTileElements;
      const std::int64_t count = std::min(kTileElements, elements - begin);
      alignas(64) float side[kTileElements];
      float* const to = count < kTileElements ? side : values + begin;
      decode_tile<L, Codec>(of, at, key_of_encoded(state, tile), to);
      if (count < kTileElements)
        std::memcpy(values + begin, side, static_cast<std::size_t>(count) * sizeof(float));
    });
  }

 private:
  // Calls `work(state, number, tile)` for each tile: the state that holds it, its number in that state, and
  // its number in the tensor. A tile that is not whole is copied to a state of its own (SideState).
  template <class Work>
  static void each(const OptimState& state, std::int64_t elements, std::int64_t first, std::int64_t last,
                   const Work& work) {
    const std::int64_t whole = std::min(last, elements / kTileElements);
    for (std::int64_t tile = first; tile < whole; ++tile) work(state, tile, tile);
    if (last == whole || first >= last) return;
    SideState side;
    work(side.read(state, kFormat, whole, elements - whole * kTileElements), 0, whole);
    side.write();
  }
};

/// The functions that decode and encode the tiles of a staged format.
struct StagedFormat {
  void (*decode)(const OptimState& state, std::int64_t tile, std::uint32_t key, float* to);
  void (*encode)(const OptimState& state, std::int64_t tile, std::uint32_t key, const float* from,
                 std::int64_t elements);
};
template <class L, class Codec>
constexpr StagedFormat staged_format() {
  return {&decode_tile<L, Codec>, &encode_tile<L, Codec>};
}

/// The codec of a step when the registers cannot hold the lookup tables of all states. A tile is decoded when
/// it is opened and encoded when it is closed; in between, its values are in memory (in the L1 cache). New
/// values can be put one vector at a time, as in a format without scales. To a rule, all staged formats look
/// the same, so its loops are compiled only once for them.
template <class L, bool kSigned>
class Staged {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = false;

  /// Must be called first. `formats` has two elements, for unsigned and for signed states.
  void use(const StagedFormat* formats) { format_ = &formats[kSigned ? 1 : 0]; }
  void open(const OptimState& state, std::int64_t tile, std::uint32_t key) {
    format_->decode(state, tile, key, values_);
  }
  F load(int i) const { return L::load(values_ + i); }
  void put(int i, F x) { L::store(values_ + i, x); }
  void close(const OptimState& state, std::int64_t tile, std::uint32_t key, std::int64_t elements) {
    format_->encode(state, tile, key, values_, elements);
  }

 private:
  const StagedFormat* format_ = nullptr;
  alignas(64) float values_[kTileElements] = {};
};

/// Whether a format is staged. The codec of its signed states decides this for all its states.
template <class L, template <class, bool> class CodecOf>
constexpr bool is_staged() {
  using Signed = CodecOf<L, true>;
  if constexpr (Signed::kSettles) {
    return !L::kHoldsTables && (Signed::kLooksUp || L::kLanes == 1);
  } else {
    return false;
  }
}

}  // namespace reef::kernels
