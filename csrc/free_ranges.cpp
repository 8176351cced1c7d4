#include "free_ranges.h"

#include <algorithm>
#include <iterator>

#include "round_up.h"

namespace reef {

void FreeRanges::insert(std::uint64_t start, std::uint64_t bytes) {
  by_start_.emplace(start, bytes);
  by_size_.emplace(bytes, start);
  bytes_ += bytes;
}

void FreeRanges::erase(std::uint64_t start, std::uint64_t bytes) {
  by_start_.erase(start);
  by_size_.erase({bytes, start});
  bytes_ -= bytes;
}

void FreeRanges::add(std::uint64_t start, std::uint64_t bytes) {
  const auto after = by_start_.lower_bound(start);
  if (after != by_start_.begin()) {
    if (const auto [before, size] = *std::prev(after); before + size == start) {
      erase(before, size);
      start = before;
      bytes += size;
    }
  }
  if (const auto next = by_start_.find(start + bytes); next != by_start_.end()) {
    const std::uint64_t size = next->second;
    erase(start + bytes, size);
    bytes += size;
  }
  insert(start, bytes);
}

std::optional<std::uint64_t> FreeRanges::take(std::uint64_t bytes, std::uint64_t alignment) {
  for (auto fits = by_size_.lower_bound({bytes, 0}); fits != by_size_.end(); ++fits) {
    const auto [size, start] = *fits;
    const std::uint64_t aligned = round_up(start, alignment);
    if (size - bytes < aligned - start) continue;
    take_at(aligned, bytes);
    return aligned;
  }
  return std::nullopt;
}

void FreeRanges::take_at(std::uint64_t start, std::uint64_t bytes) {
  const auto [whole, size] = *std::prev(by_start_.upper_bound(start));
  const std::uint64_t skipped = start - whole;
  erase(whole, size);
  if (skipped > 0) insert(whole, skipped);
  if (size > skipped + bytes) insert(start + bytes, size - skipped - bytes);
}

std::optional<FreeRanges::Range> FreeRanges::take_largest(std::uint64_t bytes) {
  if (by_size_.empty()) return std::nullopt;
  const auto [size, start] = *by_size_.rbegin();
  const std::uint64_t taken = std::min(size, bytes);
  erase(start, size);
  if (size > taken) insert(start + taken, size - taken);
  return Range{start, taken};
}

std::optional<FreeRanges::Range> FreeRanges::take_smallest(std::uint64_t bytes) {
  if (by_size_.empty()) return std::nullopt;
  const auto [size, start] = *by_size_.begin();
  const std::uint64_t taken = std::min(size, bytes);
  erase(start, size);
  if (size > taken) insert(start, size - taken);
  return Range{start + size - taken, taken};
}

}  // namespace reef
