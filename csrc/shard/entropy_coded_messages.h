#pragma once

#include <ATen/core/Tensor.h>

#include "distributed/slice_exchange.h"

namespace reef {

/// Messages of packed levels (packed_code.h) that travel in an entropy code (kernels/level_code.h). How long
/// their codes are, ranks tell each other first: 8 bytes for each message. What has come is the same bits as
/// without the code. A code that cannot be one, by its length or by what is in it, throws RankFailed, which
/// names the rank that has sent it.

/// As SliceExchange::all_to_all().
void all_to_all_entropy_coded(SliceExchange& ranks, const char* name, const at::Tensor& from,
                              const at::Tensor& to, const RanksAmong& among, int bits);
/// As SliceExchange::all_gather().
void all_gather_entropy_coded(SliceExchange& ranks, const char* name, const at::Tensor& codes,
                              const RanksAmong& among, int bits);

}  // namespace reef
