#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "reef/compression.h"
#include "reef/export.h"
#include "reef/link.h"

namespace reef {

/// Pure data and pure code (no Torch): what it costs to exchange gradients by each method of Compression, for
/// any number of ranks, also those that are not here.

/// What the ranks receive in place of the sum of all ranks' gradients.
enum class ExchangeClass : std::uint8_t {
  kExact,          ///< the sum itself
  kUnbiased,       ///< a random value whose mean is the sum
  kErrorFeedback,  ///< a part of the sum; the rest is held back and added to a later gradient
  kLossy,          ///< a part of the sum; some of the rest is lost
};
/// Gives "exact", "unbiased", "error_feedback" or "lossy".
REEF_API const char* name_of(ExchangeClass of);
/// Gives the class of this name. Throws ConfigError, which lists the names, if there is none.
REEF_API ExchangeClass exchange_class_named(const std::string& name);

/// Seconds that a rank computes for an exchange, before and after it communicates; 0 is not counted.
/// measure_exchange_work() measures them.
struct ExchangeWork {
  double add = 0;       ///< for each element of another rank's that it adds up
  double round = 0;     ///< for each element that it rounds, and holds back what that takes
  double select = 0;    ///< for each element among which it takes the largest, and holds back the rest
  double merge = 0;     ///< for each entry that it merges with others
  double write = 0;     ///< for each element of the dense sum that it writes from a few entries
  double quantize = 0;  ///< for each element that becomes a level (kQsgd)
  double sign = 0;      ///< for each element that becomes a sign, the rest held back
  double unpack = 0;    ///< for each level or sign that it adds up
  double multiply = 0;  ///< for each element of a matrix and each rank of a factor that it is multiplied by
  double rebuild = 0;   ///< for each element and rank of the sum, made of two factors, the rest held back
};
/// The members of ExchangeWork, in their order.
inline constexpr std::array kExchangeWorkMembers = {
    &ExchangeWork::add,      &ExchangeWork::round,    &ExchangeWork::select, &ExchangeWork::merge,
    &ExchangeWork::write,    &ExchangeWork::quantize, &ExchangeWork::sign,   &ExchangeWork::unpack,
    &ExchangeWork::multiply, &ExchangeWork::rebuild};

struct PriceOptions {
  int ranks = 2;  ///< from 1 to 4096, in one copy (ShardOptions::shard_degree 0)
  /// Whether a rank needs only its slice of the sum, as at all stages but Stage::kReplicate. Those stages
  /// gather parameters instead, which is the same for every method and is not counted.
  bool divided = false;
  /// Options of the methods; each method takes those that it knows. A schedule counts with its last value.
  CompressionOptions compression_options = {};
  /// The shapes of the parameters in each bucket. What kPowerSgd and kPowerSgdAlternating send depends on
  /// them; without shapes these two are not priced.
  std::vector<std::vector<std::vector<std::int64_t>>> shapes = {};
  ExchangeWork work = {};
};

/// The price of one method for all buckets, exchanged one after another.
struct ExchangePrice {
  Compression method = Compression::kNone;
  ExchangeClass gives = ExchangeClass::kExact;
  std::int64_t rounds = 0;      ///< rounds of messages, each of which waits for the one before
  std::int64_t messages = 0;    ///< messages that pass through one rank, one after another
  std::int64_t sent_bytes = 0;  ///< bytes that the busiest rank sends
  std::int64_t all_bytes = 0;   ///< bytes that all ranks send together
  double link_seconds = 0;      ///< time on the Link for rounds, messages and bytes
  double work_seconds = 0;      ///< time to compute, by ExchangeWork
  double seconds() const { return link_seconds + work_seconds; }
};

struct ExchangePrices {
  Link link;
  std::int64_t elements = 0;
  int ranks = 0;
  std::vector<ExchangePrice> methods;  ///< the fastest first

  /// Gives the fastest method of these classes, or of all classes but kLossy if `of` is empty. Throws
  /// ConfigError if no method belongs to them.
  REEF_API const ExchangePrice& fastest(const std::vector<ExchangeClass>& of = {}) const;
  /// Formats a table with one line for each method.
  REEF_API std::string table() const;
  REEF_API std::string json() const;
};

/// Prices the exchange of float32 gradients in buckets of so many elements by each method, as Reef sends them
/// over gloo. Ranks begin together and have `link` between each two of them. Times are upper bounds: the
/// dense sum hides up to one latency behind its bytes. The price of kPowerSgdAlternating is the mean of its
/// two alternating steps. Throws ConfigError for impossible numbers of ranks or elements, links, options,
/// work or shapes.
REEF_API ExchangePrices price_exchange(const Link& link, const std::vector<std::int64_t>& buckets,
                                       const PriceOptions& options);
/// The same for one bucket.
REEF_API ExchangePrices price_exchange(const Link& link, std::int64_t elements, const PriceOptions& options);

}  // namespace reef
