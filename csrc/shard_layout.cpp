#include "reef/shard_layout.h"

#include <algorithm>
#include <map>
#include <string>

#include "reef/error.h"

namespace reef {
namespace {

std::int64_t aligned(std::int64_t elements) {
  return (elements + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
}

void check(const std::vector<ShardItem>& items, int ranks, std::int64_t bucket_bytes) {
  if (ranks < 1 || bucket_bytes < 1) {
    throw ConfigError("plan_shards was given " + std::to_string(ranks) + " ranks and bucket_bytes " +
                      std::to_string(bucket_bytes) + ": give positive numbers.");
  }
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (items[i].elements >= 0 && items[i].element_bytes > 0) continue;
    throw ConfigError("plan_shards was given item " + std::to_string(i) + " of " +
                      std::to_string(items[i].elements) + " elements of " +
                      std::to_string(items[i].element_bytes) + " bytes: give numbers that are not negative.");
  }
}

}  // namespace

std::vector<ShardPiece> ShardLayout::parts(std::size_t bucket, int rank) const {
  const std::int64_t begin = this->begin(bucket, rank);
  const std::int64_t end = begin + buckets[bucket].slice_elements;
  std::vector<ShardPiece> found;
  for (const ShardPiece& item : buckets[bucket].items) {
    const std::int64_t first = std::max(begin, item.offset);
    const std::int64_t last = std::min(end, item.offset + item.elements);
    found.push_back(first < last ? ShardPiece{item.item, bucket, first - item.offset, last - first, first}
                                 : ShardPiece{item.item, bucket, 0, 0, begin});
  }
  return found;
}

std::vector<ShardPiece> ShardLayout::pieces(std::size_t bucket, int rank) const {
  std::vector<ShardPiece> found = parts(bucket, rank);
  std::erase_if(found, [](const ShardPiece& piece) { return piece.elements == 0; });
  return found;
}

ShardLayout plan_shards(const std::vector<ShardItem>& items, int ranks, std::int64_t bucket_bytes) {
  check(items, ranks, bucket_bytes);
  ShardLayout layout;
  layout.ranks = ranks;
  std::map<int, std::size_t> filling;  // by kind
  std::vector<std::int64_t> used;      // elements, by bucket
  for (std::size_t i = 0; i < items.size(); ++i) {
    const ShardItem& item = items[i];
    const std::int64_t elements = aligned(item.elements);
    auto at = filling.find(item.kind);
    if (at == filling.end() ||
        (used[at->second] > 0 && (used[at->second] + elements) * item.element_bytes > bucket_bytes)) {
      at = filling.insert_or_assign(item.kind, layout.buckets.size()).first;
      layout.buckets.push_back({item.kind, 0, {}});
      used.push_back(0);
    }
    layout.buckets[at->second].items.push_back({i, at->second, 0, item.elements, used[at->second]});
    used[at->second] += elements;
  }
  for (std::size_t bucket = 0; bucket < used.size(); ++bucket) {
    layout.buckets[bucket].slice_elements = aligned((used[bucket] + ranks - 1) / ranks);
  }
  return layout;
}

}  // namespace reef
