#include "shard/choose_compression.h"

#include <algorithm>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "reef/measure_exchange_work.h"
#include "reef/measure_link.h"

namespace reef {

std::optional<ExchangePrices> choose_compression(const ProcessGroupPtr& group, const ShardLayout& layout,
                                                 c10::ArrayRef<at::Tensor> parameters,
                                                 ShardOptions& options) {
  const std::vector<ExchangeClass> allowed = std::exchange(options.allow, {});
  PriceOptions priced{.ranks = group->getSize(),
                      .divided = options.stage != Stage::kReplicate,
                      .compression_options = std::exchange(options.compression_options, {})};
  std::vector<std::int64_t> buckets;
  for (std::size_t bucket = 0; bucket < layout.buckets.size(); ++bucket) {
    if (layout.elements(bucket) == 0) continue;
    buckets.push_back(layout.elements(bucket));
    std::vector<std::vector<std::int64_t>>& shapes = priced.shapes.emplace_back();
    for (const ShardPiece& piece : layout.buckets[bucket].items)
      shapes.push_back(parameters[piece.item].sizes().vec());
  }
  options.compression = Compression::kNone;
  if (priced.ranks == 1 || buckets.empty()) return std::nullopt;
  const Link link = measure_link(group).link;
  const double density =
      priced.compression_options.density.at(std::numeric_limits<std::int64_t>::max(), 0.001);
  priced.work = measure_exchange_work(group, density, *std::max_element(buckets.begin(), buckets.end()));
  ExchangePrices prices = price_exchange(link, buckets, priced);
  options.compression = prices.fastest(allowed).method;
  options.compression_options = options_taken(options.compression, priced.compression_options);
  return prices;
}

}  // namespace reef
