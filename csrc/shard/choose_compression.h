#pragma once

#include <optional>

#include "reef/price_exchange.h"
#include "reef/shard.h"
#include "reef/shard_layout.h"

namespace reef {

/// Compression::kAuto of `options` becomes the fastest method, with those options that it takes. Gives the
/// prices; nothing on one rank, which exchanges nothing. All ranks alike. Throws RankFailed.
std::optional<ExchangePrices> choose_compression(const ProcessGroupPtr& group, const ShardLayout& layout,
                                                 ShardOptions& options);

}  // namespace reef
