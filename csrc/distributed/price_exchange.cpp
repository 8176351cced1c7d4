#include "reef/price_exchange.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <sstream>

#include "distributed/slice_chunks.h"
#include "factor_rank.h"
#include "json.h"
#include "kernels/packed_levels.h"
#include "reef/error.h"
#include "reef/shard_layout.h"

namespace reef {
namespace {

constexpr int kMostRanks = 4096;
constexpr std::array<const char*, 4> kClassNames = {"exact", "unbiased", "error_feedback", "lossy"};

// Throws ConfigError for what is no shape.
std::int64_t elements_of(const std::vector<std::int64_t>& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements))
      throw ConfigError("price_exchange was given a shape with a dimension of " + std::to_string(size) + ".");
  }
  return elements;
}

// A bucket, and among how many ranks.
struct Exchange {
  std::int64_t ranks = 1;
  std::int64_t slice = 0;  // elements
  bool divided = false;
  const CompressionOptions& options;
  const std::vector<std::vector<std::int64_t>>& shapes;

  std::int64_t elements() const { return ranks * slice; }
  std::int64_t others() const { return ranks - 1; }
  // Of a sum, a rank has its slice; whether it is then sent to all.
  std::int64_t phases() const { return divided ? 1 : 2; }
  // Entries of a sparse method; the largest power of two among the ranks; how many are beyond it.
  std::int64_t entries() const {
    const double density = at_the_end(options.density, 0.001);
    return static_cast<std::int64_t>(std::ceil(density * static_cast<double>(elements())));
  }
  std::int64_t entry_bytes() const { return 8 * entries(); }
  std::int64_t halvings() const { return std::bit_width(static_cast<std::uint64_t>(ranks)) - 1; }
  std::int64_t beyond() const { return ranks - (std::int64_t{1} << halvings()); }
  // Rounds of a tree.
  std::int64_t doublings() const { return halvings() + (beyond() > 0 ? 1 : 0); }
  int bits() const { return static_cast<int>(at_the_end(options.bits, 8)); }
  static double at_the_end(const StepSchedule& schedule, double otherwise) {
    return schedule.at(std::numeric_limits<std::int64_t>::max(), otherwise);
  }
};

// What comes one after another on the longest way, and what is sent.
struct Messages {
  std::int64_t rounds = 0, messages = 0, bytes = 0;
  std::int64_t sent = 0, by_all = 0;
};

// Every rank sends something to each other rank, so many times, in so many messages altogether.
Messages to_each_other(const Exchange& of, std::int64_t times, std::int64_t messages, std::int64_t bytes) {
  const std::int64_t sent = times * of.others() * bytes;
  return {times, of.others() * messages, sent, sent, of.ranks * sent};
}

std::int64_t slice_of(const Exchange& of, std::int64_t elements) {
  return (elements + of.ranks - 1) / of.ranks;
}

Messages dense(const Exchange& of) {
  const std::int64_t most = SliceChunks::kReceivedBytes / of.others();
  const SliceChunks chunks(of.slice, sizeof(float), most);
  const std::int64_t back = of.divided ? 0 : chunks.together(of.others()).count();
  return to_each_other(of, of.phases(), chunks.count() + back, 4 * of.slice);
}
double dense_work(const Exchange& of, const ExchangeWork& work) {
  return work.add * static_cast<double>(of.others() * of.slice);
}

Messages rounded(const Exchange& of) { return to_each_other(of, of.phases(), of.phases(), 2 * of.slice); }
double rounded_work(const Exchange& of, const ExchangeWork& work) {
  const std::int64_t rounds = of.elements() + (of.divided ? 0 : of.slice);
  return work.round * static_cast<double>(rounds) + dense_work(of, work);
}

double selection(const Exchange& of, const ExchangeWork& work, std::int64_t merged) {
  const std::int64_t written = of.divided ? of.slice : of.elements();
  return work.select * static_cast<double>(of.elements()) + work.merge * static_cast<double>(merged) +
         work.write * static_cast<double>(written);
}

Messages top_k(const Exchange& of) { return to_each_other(of, 1, 1, of.entry_bytes()); }
double top_k_work(const Exchange& of, const ExchangeWork& work) {
  return selection(of, work, of.ranks * of.entries());
}

// Ranks beyond a power of two give what they have first, and are given the result last.
Messages butterfly(const Exchange& of) {
  const std::int64_t rounds = of.halvings() + (of.beyond() > 0 ? 2 : 0);
  const std::int64_t all = ((of.ranks - of.beyond()) * of.halvings() + 2 * of.beyond()) * of.entry_bytes();
  const std::int64_t most = of.halvings() + (of.beyond() > 0 ? 1 : 0);
  return {rounds, rounds, rounds * of.entry_bytes(), most * of.entry_bytes(), all};
}
double butterfly_work(const Exchange& of, const ExchangeWork& work) {
  return selection(of, work, 2 * of.entries() * of.doublings());
}

// Up, a round waits for the one before. Down, the first rank sends to one after another: the longest way has
// as many messages, and as many hops as a rank's number below P can have ones.
Messages tree(const Exchange& of) {
  const std::int64_t up = of.doublings();
  return {up + of.halvings(), 2 * up, 2 * up * of.entry_bytes(), up * of.entry_bytes(),
          2 * of.others() * of.entry_bytes()};
}

// Ok-Topk's seven rounds send boundaries, sizes, entries to their owners, a few sums, numbers of sums, what
// evens these out, and the largest sums. Assumes that the largest elements of all ranks lie alike, so owners
// receive equally many entries, and have equally many of the largest sums.
Messages regions(const Exchange& of) {
  constexpr std::int64_t kRounds = 7;
  const std::int64_t entry_bytes = 2 * 8 * slice_of(of, of.entries());
  Messages all = to_each_other(of, 1, kRounds, entry_bytes + 36 * of.ranks + 4);
  all.rounds = kRounds;
  return all;
}
double regions_work(const Exchange& of, const ExchangeWork& work) {
  const std::int64_t added_up = of.entries() * (of.ranks + 1) / 2;
  return selection(of, work, added_up + of.entries());
}

// Codes of slices, and a code of the sum back to all.
Messages coded(const Exchange& of, int bits) {
  return to_each_other(of, of.phases(), of.phases(), kernels::packed_bytes(of.slice, bits));
}
double coded_work(const Exchange& of, double encode, double unpack) {
  const std::int64_t back = of.divided ? 0 : 1;
  return encode * static_cast<double>(of.elements() + back * of.slice) +
         unpack * static_cast<double>((1 + back) * of.elements());
}
Messages levels(const Exchange& of) { return coded(of, of.bits()); }
double levels_work(const Exchange& of, const ExchangeWork& work) {
  return coded_work(of, work.quantize, work.unpack);
}
Messages signs(const Exchange& of) { return coded(of, 1); }
double signs_work(const Exchange& of, const ExchangeWork& work) {
  return coded_work(of, work.sign, work.unpack);
}

// What PowerSGD sends of a bucket's parameters, in elements: as they are, or the one and the other factor;
// and over how many elements, each as often as its factors' rank, it multiplies.
struct Factors {
  std::int64_t as_they_are = 0, left = 0, right = 0, multiplied = 0;
};
Factors factors_of(const Exchange& of) {
  const auto wanted = static_cast<std::int64_t>(Exchange::at_the_end(of.options.rank, kFactorRank));
  Factors factors;
  for (const std::vector<std::int64_t>& shape : of.shapes) {
    const MatrixSizes sizes = matrix_sizes(shape);
    const std::int64_t rank = factor_rank(sizes, wanted);
    if (rank == 0) factors.as_they_are += elements_of(shape);
    factors.left += rank * sizes.rows;
    factors.right += rank * sizes.columns;
    factors.multiplied += rank * sizes.rows * sizes.columns;
  }
  return factors;
}

Messages all_reduced(const Exchange& of, std::int64_t elements) {
  return elements == 0 ? Messages{} : to_each_other(of, 2, 2, 4 * slice_of(of, elements));
}
Messages both(const Messages& a, const Messages& b) {
  return {a.rounds + b.rounds, a.messages + b.messages, a.bytes + b.bytes, a.sent + b.sent,
          a.by_all + b.by_all};
}

Messages factored(const Exchange& of) {
  const Factors factors = factors_of(of);
  return both(all_reduced(of, factors.as_they_are + factors.left), all_reduced(of, factors.right));
}
double factored_work(const Exchange& of, const ExchangeWork& work) {
  const Factors factors = factors_of(of);
  const std::int64_t added = slice_of(of, factors.as_they_are + factors.left) + slice_of(of, factors.right);
  return (2 * work.multiply + work.rebuild) * static_cast<double>(factors.multiplied) +
         work.add * static_cast<double>(of.others() * added);
}

// The mean of a step of the one and a step of the other factor.
Messages in_turn(const Exchange& of) {
  const Factors factors = factors_of(of);
  const Messages two = both(all_reduced(of, factors.as_they_are + factors.left),
                            all_reduced(of, factors.as_they_are + factors.right));
  return {two.rounds / 2, two.messages / 2, two.bytes / 2, two.sent / 2, two.by_all / 2};
}
double in_turn_work(const Exchange& of, const ExchangeWork& work) {
  const Factors factors = factors_of(of);
  const std::int64_t added_in_two =
      slice_of(of, factors.as_they_are + factors.left) + slice_of(of, factors.as_they_are + factors.right);
  return (work.multiply + work.rebuild) * static_cast<double>(factors.multiplied) +
         work.add * static_cast<double>(of.others() * added_in_two) / 2;
}

// A method is a row here; docs/price_exchange.md has the formulas.
struct MethodRow {
  Compression method;
  ExchangeClass gives;
  Messages (*messages)(const Exchange&);
  double (*work)(const Exchange&, const ExchangeWork&);
  bool by_shapes = false;
};
constexpr std::array kMethods = {
    MethodRow{Compression::kNone, ExchangeClass::kExact, dense, dense_work},
    MethodRow{Compression::kBFloat16, ExchangeClass::kErrorFeedback, rounded, rounded_work},
    MethodRow{Compression::kFloat16, ExchangeClass::kErrorFeedback, rounded, rounded_work},
    MethodRow{Compression::kQsgd, ExchangeClass::kUnbiased, levels, levels_work},
    MethodRow{Compression::kSign, ExchangeClass::kErrorFeedback, signs, signs_work},
    MethodRow{Compression::kPowerSgd, ExchangeClass::kErrorFeedback, factored, factored_work, true},
    MethodRow{Compression::kPowerSgdAlternating, ExchangeClass::kErrorFeedback, in_turn, in_turn_work, true},
    MethodRow{Compression::kTopK, ExchangeClass::kErrorFeedback, top_k, top_k_work},
    MethodRow{Compression::kGTopK, ExchangeClass::kErrorFeedback, butterfly, butterfly_work},
    MethodRow{Compression::kGTopKTree, ExchangeClass::kLossy, tree, butterfly_work},
    MethodRow{Compression::kOkTopK, ExchangeClass::kErrorFeedback, regions, regions_work},
};

ExchangePrice price(const MethodRow& row, const Link& link, const std::vector<std::int64_t>& buckets,
                    const PriceOptions& options) {
  ExchangePrice price{.method = row.method, .gives = row.gives};
  if (options.ranks == 1) return price;
  static const std::vector<std::vector<std::int64_t>> kUnknown;
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    const ShardLayout layout = plan_shards({{buckets[i]}}, options.ranks, 1);
    const Exchange of{options.ranks, layout.buckets.front().slice_elements, options.divided,
                      options.compression_options, options.shapes.empty() ? kUnknown : options.shapes[i]};
    const Messages messages = row.messages(of);
    price.rounds += messages.rounds;
    price.messages += messages.messages;
    price.sent_bytes += messages.sent;
    price.all_bytes += messages.by_all;
    price.link_seconds += static_cast<double>(messages.rounds) * link.latency_seconds +
                          static_cast<double>(messages.messages) * link.message_seconds +
                          static_cast<double>(messages.bytes) / link.bytes_per_second;
    price.work_seconds += row.work(of, options.work);
  }
  return price;
}

void check_shapes(const std::vector<std::int64_t>& buckets, const PriceOptions& options) {
  if (options.shapes.empty()) return;
  if (options.shapes.size() != buckets.size()) {
    throw ConfigError("price_exchange was given shapes for " + std::to_string(options.shapes.size()) +
                      " buckets, which are " + std::to_string(buckets.size()) + ".");
  }
  for (std::size_t i = 0; i < buckets.size(); ++i) {
    std::int64_t room = buckets[i];
    for (const std::vector<std::int64_t>& shape : options.shapes[i]) room -= elements_of(shape);
    if (room >= 0) continue;
    throw ConfigError("price_exchange was given shapes of " + std::to_string(buckets[i] - room) +
                      " elements for a bucket of " + std::to_string(buckets[i]) + ".");
  }
}

void check(const std::vector<std::int64_t>& buckets, const PriceOptions& options) {
  if (options.ranks < 1 || options.ranks > kMostRanks) {
    throw ConfigError("price_exchange was given " + std::to_string(options.ranks) + " ranks: give 1 to " +
                      std::to_string(kMostRanks) + ".");
  }
  constexpr std::int64_t kMostElements = std::numeric_limits<std::uint32_t>::max();
  for (const std::int64_t elements : buckets) {
    if (elements >= 1 && elements < kMostElements) continue;
    throw ConfigError("price_exchange was given a bucket of " + std::to_string(elements) +
                      " elements: give buckets of 1 to " + std::to_string(kMostElements - 1) + ".");
  }
  for (const auto member : kExchangeWorkMembers) {
    const double seconds = options.work.*member;
    if (std::isfinite(seconds) && seconds >= 0) continue;
    throw ConfigError("price_exchange was given an ExchangeWork of " + std::to_string(seconds) +
                      " seconds: give 0 or more.");
  }
  check_shapes(buckets, options);
  if (options.compression_options.entropy_coded.has_value()) {
    throw ConfigError(
        "price_exchange was given the option entropy_coded, with which the bytes of qsgd depend on the "
        "gradients: leave it out, for bytes that they hardly exceed.");
  }
  for (const MethodRow& row : kMethods)
    check_compression(row.method, options_taken(row.method, options.compression_options));
}

std::string number_text(double value) {
  std::ostringstream text;
  text.precision(std::numeric_limits<double>::max_digits10);
  text << value;
  return text.str();
}

}  // namespace

const char* name_of(ExchangeClass of) { return kClassNames[static_cast<std::size_t>(of)]; }

ExchangeClass exchange_class_named(const std::string& name) {
  std::string all;
  for (std::size_t i = 0; i < kClassNames.size(); ++i) {
    if (name == kClassNames[i]) return static_cast<ExchangeClass>(i);
    all += (i == 0 ? "\"" : ", \"") + std::string(kClassNames[i]) + "\"";
  }
  throw ConfigError("'" + name + "' is no class of methods; give one of " + all);
}

ExchangePrices price_exchange(const Link& link, const std::vector<std::int64_t>& buckets,
                              const PriceOptions& options) {
  check_link(link);
  check(buckets, options);
  ExchangePrices prices{link, 0, options.ranks, {}};
  for (const std::int64_t elements : buckets) prices.elements += elements;
  for (const MethodRow& row : kMethods) {
    if (!row.by_shapes || !options.shapes.empty())
      prices.methods.push_back(price(row, link, buckets, options));
  }
  std::stable_sort(prices.methods.begin(), prices.methods.end(),
                   [](const auto& a, const auto& b) { return a.seconds() < b.seconds(); });
  return prices;
}

ExchangePrices price_exchange(const Link& link, std::int64_t elements, const PriceOptions& options) {
  return price_exchange(link, std::vector<std::int64_t>{elements}, options);
}

const ExchangePrice& ExchangePrices::fastest(const std::vector<ExchangeClass>& of) const {
  std::string names;
  for (const ExchangeClass each : of) names += (names.empty() ? "" : ", ") + std::string(name_of(each));
  for (const ExchangePrice& each : methods) {
    const bool is_meant = of.empty() ? each.gives != ExchangeClass::kLossy
                                     : std::find(of.begin(), of.end(), each.gives) != of.end();
    if (is_meant) return each;
  }
  throw ConfigError("of the classes " + names + " there is no method: allow exact, error_feedback, too.");
}

std::string ExchangePrices::table() const {
  std::string text = std::to_string(elements) + " elements on " + std::to_string(ranks) +
                     (ranks == 1 ? " rank, " : " ranks, ") + link_text(link) + "\n";
  std::array<char, 160> line{};
  const auto add = [&](auto... columns) {
    std::snprintf(line.data(), line.size(), columns...);
    text += line.data();
  };
  add("%-20s %-15s %12s %12s %8s %10s %16s\n", "method", "class", "ms", "of it work", "rounds", "messages",
      "bytes of a rank");
  for (const ExchangePrice& each : methods) {
    add("%-20s %-15s %12.3f %12.3f %8lld %10lld %16lld\n", name_of(each.method), name_of(each.gives),
        each.seconds() * 1e3, each.work_seconds * 1e3, static_cast<long long>(each.rounds),
        static_cast<long long>(each.messages), static_cast<long long>(each.sent_bytes));
  }
  return text;
}

std::string ExchangePrices::json() const {
  std::string text = "{\"link\": {\"latency_seconds\": " + number_text(link.latency_seconds) +
                     ", \"bytes_per_second\": " + number_text(link.bytes_per_second) +
                     ", \"message_seconds\": " + number_text(link.message_seconds) +
                     "}, \"elements\": " + std::to_string(elements) +
                     ", \"ranks\": " + std::to_string(ranks) + ", \"methods\": [";
  for (std::size_t i = 0; i < methods.size(); ++i) {
    const ExchangePrice& each = methods[i];
    text += std::string(i == 0 ? "" : ", ") + "{\"method\": " + json_string(name_of(each.method)) +
            ", \"gives\": " + json_string(name_of(each.gives)) +
            ", \"rounds\": " + std::to_string(each.rounds) +
            ", \"messages\": " + std::to_string(each.messages) +
            ", \"sent_bytes\": " + std::to_string(each.sent_bytes) +
            ", \"all_bytes\": " + std::to_string(each.all_bytes) +
            ", \"link_seconds\": " + number_text(each.link_seconds) +
            ", \"work_seconds\": " + number_text(each.work_seconds) + "}";
  }
  return text + "]}";
}

}  // namespace reef
