#pragma once

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/price_exchange.h"

namespace reef {

/// Measures the work of exchanges of gradients on the CPU, with as many threads as an exchange uses, on 2^20
/// random elements: the fastest of three repetitions on the slowest rank, so all ranks get the same.
/// `density` is the share of the elements that sparse methods select; levels are measured with 8 bits, and
/// factors with rank 4. Call it on all ranks. Throws RankFailed, and ConfigError for a density outside (0,
/// 1].
REEF_API ExchangeWork measure_exchange_work(const ProcessGroupPtr& group, double density = 0.001);

}  // namespace reef
