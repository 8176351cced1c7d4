#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/optim_step/side.h"

/// Tiles from floats to codes and back, in functions of their own: one for each format and sign.
namespace reef::kernels {

/// The values of a tile, with zeros after them at the side if it is not whole. (A class for each kind of
/// lanes, so that its code is never that of another instruction set.)
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

/// Opens a codec on a tile whose values are to be loaded.
template <class Codec>
void open_to_load(Codec& codec, const OptimState& state, std::int64_t tile, std::uint32_t key) {
  codec.open(state, tile, key);
  if constexpr (requires { codec.read_scales(); }) codec.read_scales();
}

/// `to` has room for a whole tile.
template <class L, class Codec>
[[gnu::noinline, REEF_FLAT]] void decode_tile(const OptimState& state, std::int64_t tile, std::uint32_t key,
                                              float* to) {
  Codec codec;
  open_to_load(codec, state, tile, key);
  for (int i = 0; i < kTileElements; i += L::kLanes) L::store(to + i, codec.load(i));
}

/// Of a tile that is not whole, `state` must have room for a whole one: there, zeros are encoded.
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

/// Raises new scales to what the tile needs, for a format that must know all of a tensor's values first.
template <class L, class Codec>
[[gnu::noinline, REEF_FLAT]] void survey_tile(const OptimState& state, std::int64_t tile, const float* from,
                                              std::int64_t elements) {
  Codec codec;
  codec.open(state, tile, 0);
  const PaddedValues<L> values(from, elements);
  codec.raise(values.data, nullptr);
}

/// Values to a state in a format and back.
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
  // Calls `work` with each tile: the state that it is in, its number there, and its number in the tensor. A
  // tile that is not whole is in a state at the side.
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

/// Decodes and encodes the tiles of a staged format.
struct StagedFormat {
  void (*decode)(const OptimState& state, std::int64_t tile, std::uint32_t key, float* to);
  void (*encode)(const OptimState& state, std::int64_t tile, std::uint32_t key, const float* from,
                 std::int64_t elements);
};
template <class L, class Codec>
constexpr StagedFormat staged_format() {
  return {&decode_tile<L, Codec>, &encode_tile<L, Codec>};
}

/// A codec as a step uses it where registers cannot hold what the codecs of all states look up: a tile is
/// decoded when it is opened and encoded when it is closed, by itself, and in between its values lie in
/// memory (of the first cache). It need not settle: new values are put as they come. All formats are the same
/// to a rule then, and its loops are compiled once for them.
template <class L, bool kSigned>
class Staged {
 public:
  using F = typename L::Floats;
  static constexpr bool kSettles = false;

  /// To be called first. `formats` are that of unsigned states and that of signed ones.
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

/// Whether a format is staged: its signed states say it for all. One lane has no registers to speak of.
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
