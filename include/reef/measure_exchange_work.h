#pragma once

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/price_exchange.h"

namespace reef {

/// What exchanges of gradients cost on the CPU, one thread communicating and LibTorch's threads beside it: of
/// 2^20 random elements, three times, the fastest; of the ranks, the slowest, so all get the same. `density`:
/// of what is selected; levels are of 8 bits, and factors of rank 4. All ranks call it alike. Throws
/// ConfigError for a density that none can be, and RankFailed.
REEF_API ExchangeWork measure_exchange_work(const ProcessGroupPtr& group, double density = 0.001);

}  // namespace reef
