#include "kernels/top_k_by_warps.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <random>

#include "kernels/top_k/warp.h"

namespace reef::kernels {
namespace {

using namespace top_k;

class Warps {
 public:
  Warps(std::int64_t elements, std::int64_t parts, std::uint64_t seed)
      : elements_(elements), order_(static_cast<std::size_t>(parts)), random_(seed) {
    std::iota(order_.begin(), order_.end(), 0);
  }

  /// Calls `begin(part)`, and what that returns for each row, with the index of its first element.
  template <class Begin>
  void each_part(const Begin& begin) {
    std::shuffle(order_.begin(), order_.end(), random_);
    const auto parts = static_cast<std::int64_t>(order_.size());
    for (const std::int64_t part : order_) {
      auto work = begin(part);
      const Tiles tiles = tiles_of_part(part, parts, elements_);
      for (std::int64_t tile = tiles.first; tile < tiles.last; ++tile) {
        for (int row = 0; row < kRows; ++row) work(tile, row);
      }
    }
  }
  template <class Work>
  void each_element(const Work& work) {
    each_part([&](std::int64_t part) {
      return [&work, part, this](std::int64_t tile, int row) {
        for (int thread = 0; thread < kWarp; ++thread) {
          const std::int64_t i = index_of(tile, row, thread);
          if (i < elements_) work(part, i);
        }
      };
    });
  }

 private:
  std::int64_t elements_;
  std::vector<std::int64_t> order_;
  std::mt19937_64 random_;
};

// One block's threads, which exchange what those before have counted.
template <class Thread, class Count, class Make, class End>
void gather(const Count& none, const Make& make, const End& end) {
  std::vector<Thread> threads;
  for (int thread = 0; thread < kGathering; ++thread) threads.push_back(make(thread));
  Count before = none;
  for (const Thread& thread : threads) {
    const Count counted = thread.counted();
    end(thread, before);
    before = before + counted;
  }
}

}  // namespace

std::vector<SparseEntry> take_largest_by_warps(const float* gradient, const float* residual, float* left,
                                               std::int64_t elements, std::int64_t k, std::int64_t parts,
                                               std::uint64_t seed) {
  Warps warps(elements, parts, seed);
  const auto scratch = std::make_unique<Scratch>();
  constexpr std::uint32_t kNoIndex = std::numeric_limits<std::uint32_t>::max();
  std::vector<SparseEntry> entries(static_cast<std::size_t>(k), {kNoIndex, 0});
  Threshold& threshold = scratch->threshold;
  threshold = {0, static_cast<std::uint32_t>(k)};
  for (int digit = 0; digit < kDigits; ++digit) {
    warps.each_element([&](std::int64_t, std::int64_t i) {
      if (digit == 0) left[i] = sum_of(gradient, residual, i);
      const int bin = bin_of(left[i], digit, threshold);
      if (bin >= 0) ++scratch->counts[digit][bin];
    });
    const Threshold known = threshold;
    gather<FindDigit>(
        std::uint32_t{0}, [&](int thread) { return FindDigit(scratch->counts[digit], digit, known, thread); },
        [&](const FindDigit& find, std::uint32_t above) { find.end(above, &threshold); });
  }
  warps.each_element([&](std::int64_t part, std::int64_t i) {
    Counts& counts = scratch->of_parts[part];
    counts = counts + Counts{is_above(left[i], threshold) ? 1U : 0U, is_at(left[i], threshold) ? 1U : 0U};
  });
  gather<FindBefore>(
      Counts{0, 0}, [&](int thread) { return FindBefore(scratch->of_parts, parts, thread); },
      [](const FindBefore& find, const Counts& before) { find.end(before); });
  warps.each_part([&](std::int64_t part) {
    std::vector<Take> threads;
    for (int thread = 0; thread < kWarp; ++thread)
      threads.emplace_back(threshold, scratch->of_parts[part], entries.data(), thread);
    return [&, threads](std::int64_t tile, int row) mutable {
      std::uint32_t larger = 0, equal = 0;
      const auto value_of = [&](int thread) {
        const std::int64_t i = index_of(tile, row, thread);
        return i < elements ? left[i] : 0;
      };
      for (int thread = 0; thread < kWarp; ++thread) {
        larger |= (is_above(value_of(thread), threshold) ? 1U : 0U) << thread;
        equal |= (is_at(value_of(thread), threshold) ? 1U : 0U) << thread;
      }
      for (int thread = 0; thread < kWarp; ++thread) {
        const std::int64_t i = index_of(tile, row, thread);
        const float rest = threads[static_cast<std::size_t>(thread)].take(i, value_of(thread), larger, equal);
        if (i < elements) left[i] = rest;
      }
    };
  });
  const auto is_none = [](const SparseEntry& each) { return each.index == kNoIndex; };
  entries.erase(std::find_if(entries.begin(), entries.end(), is_none), entries.end());
  return entries;
}

}  // namespace reef::kernels
