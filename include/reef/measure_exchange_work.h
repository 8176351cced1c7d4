#pragma once

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/price_exchange.h"

namespace reef {

/// Measures the work of exchanges of gradients on the CPU, with as many threads as an exchange uses, on all
/// ranks at once, since ranks of one machine share its memory and processors: the median of three repetitions
/// on the slowest rank, so all ranks get the same. `density` is the share of the elements that sparse methods
/// select; levels are measured with 8 bits, and factors with rank 4.
///
/// `elements` is the size of what will be exchanged, which may fit into a cache or not. From 2^16 to 2^22
/// random ones are measured, which takes 20 bytes of memory each. Call it on all ranks. Throws RankFailed,
/// and ConfigError for a density outside (0, 1] and for less than one element.
REEF_API ExchangeWork measure_exchange_work(const ProcessGroupPtr& group, double density = 0.001,
                                            std::int64_t elements = std::int64_t{1} << 22);

}  // namespace reef
