#pragma once

#include <cstdint>

#include "kernels/lane.h"
#include "kernels/top_k.h"

/// take_largest() by warps of 32 threads: what one thread does, from one exchange between threads to the
/// next. So all of it is ordinary code, which the tests run on the CPU, thread by thread. The threshold is
/// found by its digits, the highest first, and what is taken has its place from counts alone, so the order in
/// which warps run does not matter:
///
///   1. the sums are written, and the first digits of their magnitudes are counted, which gives the first
///      digit of the k-th largest magnitude (FindDigit);
///   2. the second digits of the elements that share the first one are counted, which gives the second;
///   3. the third digit is found in the same way;
///   4. each part of the vector counts its elements above the k-th magnitude and those equal to it, and a
///      prefix sum over the parts gives what is in the parts before each one (FindBefore);
///   5. each part writes its entries, and the residual (Take).
///
/// Memory is read five times and written once, and beside it there are 88 KiB.
namespace reef::kernels::top_k {

inline constexpr int kWarp = 32;                      ///< threads
inline constexpr int kRows = 8;                       ///< of a tile; a thread has one element of each
inline constexpr std::int64_t kTile = kWarp * kRows;  ///< elements
inline constexpr std::int64_t kMostParts = 8192;      ///< of whole tiles, one for each warp
inline constexpr int kGathering = 1024;               ///< threads of the block that adds up counts
inline constexpr int kDigits = 3;
inline constexpr int kMostBins = 2048;

/// Of a magnitude's 31 bits the first digit has 11, the others 10.
REEF_LANE constexpr int bins_of(int digit) { return digit == 0 ? 2048 : 1024; }
REEF_LANE constexpr int shift_of(int digit) { return 20 - 10 * digit; }

REEF_LANE std::int64_t tiles_of(std::int64_t elements) { return (elements + kTile - 1) / kTile; }
REEF_LANE std::int64_t parts_of(std::int64_t elements) {
  const std::int64_t tiles = tiles_of(elements);
  return tiles < kMostParts ? tiles : kMostParts;
}
struct Tiles {
  std::int64_t first, last;
};
REEF_LANE Tiles tiles_of_part(std::int64_t part, std::int64_t parts, std::int64_t elements) {
  const std::int64_t tiles = tiles_of(elements);
  return {part * tiles / parts, (part + 1) * tiles / parts};
}
/// Rows follow each other, so a warp reads adjacent elements, in the order of their indices.
REEF_LANE std::int64_t index_of(std::int64_t tile, int row, int thread) {
  return tile * kTile + row * kWarp + thread;
}

/// What is known of the k-th largest magnitude: its digits so far, and how many of those that share them are
/// among the k largest, counted from the first. If fewer than k are not zero: magnitude 0, of which none is.
struct Threshold {
  std::uint32_t magnitude;
  std::uint32_t wanted;
};

struct Counts {
  std::uint32_t larger, equal;
  REEF_LANE Counts operator+(const Counts& other) const {
    return {larger + other.larger, equal + other.equal};
  }
};

/// The device memory through which the kernels pass on what they have counted.
struct Scratch {
  std::uint32_t counts[kDigits][kMostBins];  ///< zeros at first
  Threshold threshold;
  Counts of_parts[kMostParts];
};

REEF_LANE float sum_of(const float* gradient, const float* residual, std::int64_t i) {
  return residual != nullptr ? gradient[i] + residual[i] : gradient[i];
}

/// Returns the bin in which an element is counted for this digit, or -1 if it is not counted: a zero, or an
/// element that does not share the digits that are known.
REEF_LANE int bin_of(float value, int digit, const Threshold& known) {
  const std::uint32_t bits = magnitude_bits(value);
  const int shared = shift_of(digit) + (digit == 0 ? 11 : 10);
  const bool is_counted = bits > 0 && known.wanted > 0 && bits >> shared == known.magnitude >> shared;
  if (!is_counted) return -1;
  return static_cast<int>(bits >> shift_of(digit) & static_cast<std::uint32_t>(bins_of(digit) - 1));
}

/// One thread's share of the search for a digit of the k-th largest magnitude, in a block of kGathering
/// threads. Threads share out the bins in order, from the highest on.
class FindDigit {
 public:
  REEF_LANE FindDigit(const std::uint32_t* counts, int digit, const Threshold& known, int thread)
      : known_(known), digit_(digit), is_last_(thread == kGathering - 1) {
    const int each = bins_of(digit) / kGathering;
    first_ = bins_of(digit) - 1 - thread * each;
    for (int i = 0; i < each; ++i) counts_[i] = counts[first_ - i];
  }
  REEF_LANE std::uint32_t counted() const { return counts_[0] + counts_[1]; }

  /// When all have begun, and `above` is what has been counted by the threads before this one. One thread, at
  /// most, writes what is known then.
  REEF_LANE void end(std::uint32_t above, Threshold* found) const {
    std::uint32_t larger = above;
    for (int i = 0; i < kMostEach; ++i) {
      const bool is_here = larger < known_.wanted && known_.wanted - larger <= counts_[i];
      if (is_here) {
        const auto bin = static_cast<std::uint32_t>(first_ - i);
        *found = {known_.magnitude | bin << shift_of(digit_), known_.wanted - larger};
      }
      larger += counts_[i];
    }
    if (is_last_ && larger < known_.wanted) *found = {0, 0};
  }

 private:
  static constexpr int kMostEach = kMostBins / kGathering;
  static_assert(kMostEach == 2);
  Threshold known_;
  int digit_;
  bool is_last_;
  int first_;
  std::uint32_t counts_[kMostEach] = {0, 0};
};

REEF_LANE bool is_above(float value, const Threshold& threshold) {
  return magnitude_bits(value) > threshold.magnitude;
}
REEF_LANE bool is_at(float value, const Threshold& threshold) {
  return magnitude_bits(value) == threshold.magnitude && threshold.wanted > 0;
}

/// One thread's share of the prefix sum over the counts of the parts, in a block of kGathering threads.
class FindBefore {
 public:
  REEF_LANE FindBefore(Counts* of_parts, std::int64_t parts, int thread) {
    constexpr std::int64_t kEach = kMostParts / kGathering;
    const std::int64_t first = thread * kEach;
    const std::int64_t rest = parts - first;
    own_ = of_parts + first;
    parts_ = rest < 0 ? 0 : rest < kEach ? static_cast<int>(rest) : static_cast<int>(kEach);
  }
  REEF_LANE Counts counted() const {
    Counts sum{0, 0};
    for (int i = 0; i < parts_; ++i) sum = sum + own_[i];
    return sum;
  }
  /// When `before` is what the threads before this one have counted.
  REEF_LANE void end(Counts before) const {
    for (int i = 0; i < parts_; ++i) {
      const Counts of_part = own_[i];
      own_[i] = before;
      before = before + of_part;
    }
  }

 private:
  Counts* own_;
  int parts_;
};

REEF_LANE std::uint32_t ones(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return static_cast<std::uint32_t>(__popc(bits));
#else
  return static_cast<std::uint32_t>(__builtin_popcount(bits));
#endif
}

/// One thread's share of writing the entries of one part of the vector, row by row.
class Take {
 public:
  /// `before`: the counts of all parts before this one.
  REEF_LANE Take(const Threshold& threshold, const Counts& before, SparseEntry* entries, int thread)
      : threshold_(threshold), before_(before), entries_(entries), thread_(thread) {}

  /// Writes the thread's element of a row if it is taken, and returns its residual. `larger` and `equal` are
  /// ballots of the warp, with a bit for each thread.
  REEF_LANE float take(std::int64_t index, float value, std::uint32_t larger, std::uint32_t equal) {
    const std::uint32_t own = std::uint32_t{1} << thread_, first = own - 1;
    const std::uint32_t larger_before = before_.larger + ones(larger & first);
    const std::uint32_t equal_before = before_.equal + ones(equal & first);
    const bool is_taken = (larger & own) != 0 || ((equal & own) != 0 && equal_before < threshold_.wanted);
    before_ = before_ + Counts{ones(larger), ones(equal)};
    if (is_taken) {
      const std::uint32_t of_equal = equal_before < threshold_.wanted ? equal_before : threshold_.wanted;
      entries_[larger_before + of_equal] = {static_cast<std::uint32_t>(index), value};
      return 0;
    }
    const bool is_finite = magnitude_bits(value) < 0x7F800000U;
    return is_finite ? value : 0;
  }

 private:
  Threshold threshold_;
  Counts before_;
  SparseEntry* entries_;
  int thread_;
};

}  // namespace reef::kernels::top_k
