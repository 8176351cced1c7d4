#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "reef/price_exchange.h"
#include "reef/shard.h"
#include "reef/shard_layout.h"

namespace reef {

/// Compression::kAuto of `options` becomes the fastest method, with those options that it takes. Gives the
/// prices, or nothing on one rank, which has nobody to exchange with. `parameters` are the layout's items.
/// All ranks call it alike. Throws RankFailed.
std::optional<ExchangePrices> choose_compression(const ProcessGroupPtr& group, const ShardLayout& layout,
                                                 c10::ArrayRef<at::Tensor> parameters, ShardOptions& options);

}  // namespace reef
