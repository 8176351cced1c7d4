#pragma once

#include <algorithm>
#include <cstring>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/optim_step/side.h"

namespace reef::kernels {

/// Values to a state in a format and back. A tile that is not whole is worked on at the side.
template <class L, template <class, bool> class Codec, OptimFormat kFormat, bool kSigned>
struct Coder {
  [[REEF_FLAT]] static void encode(const float* values, const OptimState& state, std::int64_t elements,
                                   std::int64_t first, std::int64_t last) {
    each(state, elements, first, last, [&](auto& codec, std::int64_t begin, std::int64_t count) {
      const Values from(values + begin, count);
      if constexpr (Codec<L, kSigned>::kSettles) {
        put(codec, from.data);
        codec.close();
        for (int i = 0; i < kTileElements; i += 4 * L::kLanes) {
          typename L::Ints codes[4];
          for (int k = 0; k < 4; ++k) codes[k] = codec.code(codec.find(i + k * L::kLanes));
          codec.store(i, codes);
        }
      } else {
        for (int i = 0; i < kTileElements; i += L::kLanes) {
          L::prefetch(from.data + i, prefetch_bytes);
          codec.put(i, L::load(from.data + i));
        }
      }
    });
  }

  /// Instead, where all of the values must be known first.
  [[REEF_FLAT]] static void survey(const float* values, const OptimState& state, std::int64_t elements,
                                   std::int64_t first, std::int64_t last) {
    each(state, elements, first, last, [&](auto& codec, std::int64_t begin, std::int64_t count) {
      const Values from(values + begin, count);
      put(codec, from.data);
      codec.raise();
    });
  }

  [[REEF_FLAT]] static void decode(const OptimState& state, float* values, std::int64_t elements,
                                   std::int64_t first, std::int64_t last) {
    each(state, elements, first, last, [&](auto& codec, std::int64_t begin, std::int64_t count) {
      alignas(64) float side[kTileElements];
      float* const to = count < kTileElements ? side : values + begin;
      for (int i = 0; i < kTileElements; i += L::kLanes) L::store(to + i, codec.load(i));
      if (count < kTileElements) std::memcpy(values + begin, side, count * sizeof(float));
    });
  }

 private:
  /// Those of a tile, padded with zeros at the side if it is not whole.
  struct Values {
    Values(const float* from, std::int64_t count) : data(from) {
      if (count == kTileElements) return;
      std::fill(std::copy_n(from, count, side), side + kTileElements, 0.0F);
      data = side;
    }
    const float* data;
    alignas(64) float side[kTileElements];
  };

  static void put(Codec<L, kSigned>& codec, const float* from) {
    for (int i = 0; i < kTileElements; i += 4 * L::kLanes) {
      const auto lanes = [&](int k) {
        L::prefetch(from + i + k * L::kLanes, kPrefetchBytes);
        return L::load(from + i + k * L::kLanes);
      };
      codec.put(i, {lanes(0), lanes(1), lanes(2), lanes(3)});
    }
  }

  template <class Work>
  static void each(const OptimState& state, std::int64_t elements, std::int64_t first, std::int64_t last,
                   const Work& work) {
    Codec<L, kSigned> codec;
    for (std::int64_t tile = first; tile < last; ++tile) {
      const std::int64_t begin = tile * kTileElements;
      const std::int64_t count = std::min(kTileElements, elements - begin);
      if (count == kTileElements) {
        codec.open(state, tile, key_of_encoded(state, tile));
        work(codec, begin, count);
        continue;
      }
      SideState<kFormat> side;
      codec.open(side.read(state, tile, count), 0, key_of_encoded(state, tile));
      work(codec, begin, count);
      side.write();
    }
  }
};

}  // namespace reef::kernels
