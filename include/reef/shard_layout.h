#pragma once

#include <cstdint>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data and pure code (no Torch): which elements of a model's parameters each rank keeps.

/// A tensor to be laid out.
struct ShardItem {
  std::int64_t elements = 0;
  std::int64_t element_bytes = 4;
  int kind = 0;  ///< items of one kind (dtype, device, ...) may share a bucket
};

/// Elements [first, first + elements) of an item, from element `offset` of its bucket on.
struct ShardPiece {
  std::size_t item = 0;
  std::size_t bucket = 0;
  std::int64_t first = 0;
  std::int64_t elements = 0;
  std::int64_t offset = 0;
};

/// Flat memory that travels as one: as many slices as there are ranks, one after another, rank r's being
/// number r.
struct ShardBucket {
  int kind = 0;
  std::int64_t slice_elements = 0;
  std::vector<ShardPiece> items;  ///< whole, in order
};

/// Which slices a rank keeps, where there may be more ranks than slices: ranks that follow each other have a
/// copy of everything among them.
struct ShardPlace {
  int slice = 0;  ///< its number, in every bucket
  int copy = 0;   ///< the number of the copy that it belongs to
};

struct ShardLayout {
  int ranks = 1;  ///< of a copy
  std::vector<ShardBucket> buckets;

  ShardPlace place_of(int rank) const { return {rank % ranks, rank / ranks}; }
  std::int64_t elements(std::size_t bucket) const { return ranks * buckets[bucket].slice_elements; }
  /// At which element of its bucket slice number `slice` begins.
  std::int64_t begin(std::size_t bucket, int slice) const { return slice * buckets[bucket].slice_elements; }
  /// What `rank` (of a copy) keeps of a bucket, in order. Items without elements are in nobody's slice.
  REEF_API std::vector<ShardPiece> pieces(std::size_t bucket, int rank) const;
  /// The same, but of every item of the bucket: elements [0, 0) of what others keep, where the slice begins.
  REEF_API std::vector<ShardPiece> parts(std::size_t bucket, int rank) const;
};

/// Every item, and every slice, begins at a multiple of so many elements, so that a block of an optimizer's
/// codes lies in one slice, and is the same block for any number of ranks.
inline constexpr std::int64_t kShardAlignment = 256;

/// Fills buckets with the items in their order: an item goes into the last bucket of its kind unless that
/// would have more than `bucket_bytes`. An item is never divided between buckets, so one that is larger has
/// its own. Padding: less than kShardAlignment elements an item, and less than ranks * kShardAlignment a
/// bucket. Throws ConfigError if a number is not positive (elements: negative).
REEF_API ShardLayout plan_shards(const std::vector<ShardItem>& items, int ranks, std::int64_t bucket_bytes);

}  // namespace reef
