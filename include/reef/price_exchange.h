#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/compression.h"
#include "reef/export.h"
#include "reef/link.h"

namespace reef {

/// Pure data and pure code (no Torch): what it costs to exchange gradients by each method of Compression, for
/// any number of ranks, also those that are not here.

/// What a method makes of the sum of all ranks' gradients.
enum class ExchangeClass : std::uint8_t {
  kExact,          ///< it arrives
  kUnbiased,       ///< what arrives is it in the mean
  kErrorFeedback,  ///< what does not arrive is held back, and added to a later one
  kLossy,          ///< some of it is lost
};
/// "exact", "unbiased", "error_feedback", "lossy"; and the one of this name. Throws ConfigError.
REEF_API const char* name_of(ExchangeClass of);
REEF_API ExchangeClass exchange_class_named(const std::string& name);

/// Seconds that a rank works, as they have been measured; 0: not counted. It works before and after it
/// communicates.
struct ExchangeWork {
  double add = 0;       ///< for each element of another rank's that it adds up
  double round = 0;     ///< for each element that it rounds, and holds back what that takes
  double select = 0;    ///< for each element among which it takes the largest, and holds back the rest
  double merge = 0;     ///< for each entry that it merges with others
  double quantize = 0;  ///< for each element that becomes a level (kQsgd)
  double sign = 0;      ///< for each element that becomes a sign, the rest held back
  double unpack = 0;    ///< for each level or sign that it adds up
  double multiply = 0;  ///< for each element of a matrix and each rank of a factor that it is multiplied by
  double rebuild = 0;   ///< for each element and rank of the sum, made of two factors, the rest held back
};

struct PriceOptions {
  int ranks = 2;  ///< at most 4096, which are one copy (ShardOptions::shard_degree 0)
  /// Whether a rank needs no more than its slice of the sum: at all stages but Stage::kReplicate. The
  /// all-gather of parameters that these have instead is the same for each method, and not counted.
  bool divided = false;
  /// Each method takes those that it knows. What changes with the steps is what it is in the end.
  CompressionOptions compression_options = {};
  /// Of each bucket, its parameters': without them kPowerSgd and kPowerSgdAlternating have no price, as what
  /// they send depends on the shapes.
  std::vector<std::vector<std::vector<std::int64_t>>> shapes = {};
  ExchangeWork work = {};
};

/// Of all buckets, one after another.
struct ExchangePrice {
  Compression method = Compression::kNone;
  ExchangeClass gives = ExchangeClass::kExact;
  std::int64_t rounds = 0;      ///< of messages that wait for each other
  std::int64_t messages = 0;    ///< one after another through one rank
  std::int64_t sent_bytes = 0;  ///< of the rank that sends most
  std::int64_t all_bytes = 0;   ///< that all ranks send
  double link_seconds = 0;      ///< rounds, messages and bytes on the Link
  double work_seconds = 0;      ///< ExchangeWork
  double seconds() const { return link_seconds + work_seconds; }
};

struct ExchangePrices {
  Link link;
  std::int64_t elements = 0;
  int ranks = 0;
  std::vector<ExchangePrice> methods;  ///< the fastest first

  /// Of these classes; if there are none, of all but kLossy. Throws ConfigError if no method is of them.
  REEF_API const ExchangePrice& fastest(const std::vector<ExchangeClass>& of = {}) const;
  /// A line a method.
  REEF_API std::string table() const;
  REEF_API std::string json() const;
};

/// What each method takes, and of kPowerSgdAlternating's two steps the mean, to exchange float32 gradients
/// that travel in buckets of so many elements, as Reef sends them by messages (gloo). Times are those of
/// ranks that come together and have `link` between each two. Upper bounds: the dense sum hides up to a round
/// behind its bytes. Throws ConfigError for a number of ranks, elements, a link, options or shapes that
/// cannot be.
REEF_API ExchangePrices price_exchange(const Link& link, const std::vector<std::int64_t>& buckets,
                                       const PriceOptions& options);
/// In one bucket.
REEF_API ExchangePrices price_exchange(const Link& link, std::int64_t elements, const PriceOptions& options);

}  // namespace reef
