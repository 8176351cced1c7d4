#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <type_traits>

#include "kernels/optim_step.h"
#include "kernels/optim_step/codecs.h"
#include "kernels/raise.h"

namespace reef::kernels {

/// The new scales of a matrix's columns, which threads raise together.
template <class L>
struct SharedColumns {
  float* scales;

  void raise(std::int64_t column, float x) { raise_to(scales + column, x); }
  void raise(std::int64_t column, typename L::Floats x) {
    // Other threads may raise the same scales meanwhile, so raise_to() compares again what looks too small.
    if (all(L::load(scales + column) >= x)) return;
    alignas(64) float lanes[L::kLanes];
    L::store(lanes, x);
    for (int k = 0; k < L::kLanes; ++k) raise(column + k, lanes[k]);
  }
};

/// Gathers the new column scales that one thread's tiles of a matrix need, until flush() raises the shared
/// ones. If threads raised the shared scales at every tile, they would contend for the cache lines.
template <class L>
class GatheredColumns {
 public:
  static constexpr std::int64_t kMost = 4096;  ///< the largest number of columns

  GatheredColumns() {}  // Does not initialize the array, most of which is usually not used.
  void open(SharedColumns<L> shared, std::int64_t columns) {
    if (columns_ > 0) return;
    shared_ = shared;
    columns_ = columns;
    std::fill_n(scales_, columns, 0.0F);
  }
  void raise(std::int64_t column, float x) { scales_[column] = std::max(scales_[column], x); }
  void raise(std::int64_t column, typename L::Floats x) {
    L::store(scales_ + column, max(L::load(scales_ + column), x));
  }
  void flush() {
    std::int64_t column = 0;
    for (; column + L::kLanes <= columns_; column += L::kLanes)
      shared_.raise(column, L::load(scales_ + column));
    for (; column < columns_; ++column) shared_.raise(column, scales_[column]);
    columns_ = 0;
  }

 private:
  SharedColumns<L> shared_{};
  std::int64_t columns_ = 0;
  alignas(64) float scales_[kMost];
};

/// The codec of an unsigned state of a matrix: a value is encoded in sixteenths of its row's or its column's
/// scale, whichever is smaller (2309.01507, section 4.2). It is a codec as described in codecs.h, except that
/// read_scales() must precede load(), and that the new scales must be known before the step: raise() raises
/// them to what a tile needs.
template <class L>
class Rank1Codec {
 public:
  using F = typename L::Floats;
  using I = typename L::Ints;
  using Code = Int4Code<L, false>;
  static constexpr bool kSettles = true;

  void open(const OptimState& state, std::int64_t tile, std::uint32_t) {
    codes_ = reinterpret_cast<std::uint8_t*>(state.codes) + tile * kHalf;
    matrix_ = state.matrix;
    scales_ = reinterpret_cast<const float*>(state.scales);
    new_scales_ = state.new_scales;
    first_ = state.first + tile * kTileElements;
    if (matrix_.rows * matrix_.columns - first_ < kTileElements) std::fill_n(unit_, kTileElements, 0.0F);
  }
  void read_scales() {
    prefetch_tile<L, kHalf>(codes_);
    each_scale(scales_, [&](int i, F scale) { L::store(unit_ + i, scale * L::all(1.0F / 16)); });
  }
  F load(int i) const {
    const I pair = L::load_bytes(codes_ + i % kHalf);
    return Code::value(i < kHalf ? pair & L::all(15) : shift_right<4>(pair), L::load(unit_ + i));
  }
  void put(int i, const F (&x)[4]) {
    for (int k = 0; k < 4; ++k) L::store(values_ + i + k * L::kLanes, x[k]);
  }
  F waiting(int i) const { return L::load(values_ + i); }
  void close() {
    each_scale(new_scales_, [&](int i, F scale) {
      L::store(unit_ + i, L::all(Code::kUnits) / max(scale, L::all(FLT_MIN * Code::kUnits)));
    });
  }
  I find(int i) const { return find(values_, i); }
  I code(I found) const { return found; }
  void store(int i, const I (&codes)[4]) {
    if (i < kHalf) L::template store_bytes<0>(codes_ + i, codes);
  }
  void raise(GatheredColumns<L>* gathered) { raise(values_, gathered); }

  /// Encodes and stores a whole tile of new values.
  void encode(const float* from) {
    close();
    for (int i = 0; i < kHalf; i += 4 * L::kLanes) {
      I codes[4];
      for (int k = 0; k < 4; ++k) codes[k] = find(from, i + k * L::kLanes);
      store(i, codes);
    }
  }

  /// Raises the new scales to what these values of the tile need. Column scales are raised in `gathered`, or
  /// directly if it is null or too small for the columns of the matrix.
  [[gnu::noinline, REEF_FLAT]] void raise(const float* values, GatheredColumns<L>* gathered) {
    SharedColumns<L> shared{new_scales_ + matrix_.rows};
    if (gathered == nullptr || matrix_.columns > GatheredColumns<L>::kMost) return raise_in(shared, values);
    gathered->open(shared, matrix_.columns);
    raise_in(*gathered, values);
  }

 private:
  static constexpr int kHalf = kTileElements / 2;

  // Calls `work(begin, end, row, column)` for each row that the tile intersects: its elements [begin, end)
  // are in the row, from `column` on. A tile that is not whole ends with the last row.
  template <class Work>
  void each_run(const Work& work) const {
    std::int64_t row = first_ / matrix_.columns;
    std::int64_t column = first_ % matrix_.columns;
    for (int i = 0; i < kTileElements && row < matrix_.rows; ++row, column = 0) {
      const int end =
          i + static_cast<int>(std::min<std::int64_t>(kTileElements - i, matrix_.columns - column));
      work(i, end, row, column);
      i = end;
    }
  }
  // Calls `work(i, scales)` for the elements of the tile in ascending order, one vector at a time. Lanes
  // beyond the end of a row have arbitrary values: the next row overwrites them, and arrays have room for one
  // more vector.
  template <class Work>
  void each_scale(const float* scales, const Work& work) const {
    each_run([&](int begin, int end, std::int64_t row, std::int64_t column) {
      const float* const of_columns = scales + matrix_.rows + column - begin;
      const F of_row = L::all(scales[row]);
      int i = begin;
      for (; i + L::kLanes <= end; i += L::kLanes) work(i, min(of_row, L::load(of_columns + i)));
      for (; i < end; ++i) work(i, min(of_row, L::all(of_columns[i])));
    });
  }
  template <class Columns>
  void raise_in(Columns& columns, const float* values) {
    each_run([&](int begin, int end, std::int64_t row, std::int64_t column) {
      F largest = L::all(0.0F);
      int i = begin;
      for (; i + L::kLanes <= end; i += L::kLanes) {
        const F x = limited(values, i);
        largest = max(largest, x);
        columns.raise(column + i - begin, x);
      }
      alignas(64) float lanes[L::kLanes];
      L::store(lanes, largest);
      float most = *std::max_element(lanes, lanes + L::kLanes);
      for (; i < end; ++i) {
        const float x = std::min(values[i], FLT_MAX);
        most = std::max(most, x);
        columns.raise(column + i - begin, x);
      }
      raise_to(new_scales_ + row, most);
    });
  }
  static F limited(const float* values, int i) { return min(L::load(values + i), L::all(FLT_MAX)); }
  // Returns a byte of two codes, or 0 for elements from kHalf on, whose codes are in the bytes of the others.
  I find(const float* values, int i) const {
    const auto nibble = [&](int at) { return code_.find(limited(values, at), L::load(unit_ + at)); };
    if (i >= kHalf) return L::all(0);
    return nibble(i) | shift_left<4>(nibble(i + kHalf));
  }

  Code code_{Code::map()};
  std::uint8_t* codes_ = nullptr;
  OptimMatrix matrix_;
  const float* scales_ = nullptr;
  float* new_scales_ = nullptr;
  std::int64_t first_ = 0;
  alignas(64) float values_[kTileElements];
  /// For each element, the unit in which it is decoded; after close(), the number of new units in 1. Elements
  /// beyond the tensor have arbitrary values.
  alignas(64) float unit_[kTileElements + L::kLanes];
};

/// The codec of signed states in a survey. The result of a survey does not depend on them, so it reads no
/// memory and stores nothing.
template <class L>
struct Unsurveyed {
  using F = typename L::Floats;
  static constexpr bool kSettles = true;

  F load(int) const { return L::all(0.0F); }
  void put(int, const F (&)[4]) {}
};
template <class L, bool kSigned>
using Surveyed = std::conditional_t<kSigned, Unsurveyed<L>, Rank1Codec<L>>;

/// The codecs of kInt4Rank1: unsigned states have rank-1 scales, signed states are those of kInt4.
template <class L, bool kSigned>
using Int4Rank1Codec = std::conditional_t<kSigned, Int4Codec<L, true>, Rank1Codec<L>>;

}  // namespace reef::kernels
