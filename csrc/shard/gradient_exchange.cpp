#include "shard/gradient_exchange.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shard/native_exchange.h"
#include "shard/ordered_exchange.h"

namespace reef {

GradientExchange::GradientExchange(const ProcessGroupPtr& group, int number, int slices,
                                   const ShardOptions& options)
    : ranks_(group, number, slices),
      reduction_(options.reduction),
      divided_(options.stage != Stage::kReplicate) {}

GradientExchange::~GradientExchange() = default;

std::unique_ptr<GradientExchange> make_gradient_exchange(const ProcessGroupPtr& group, int number, int slices,
                                                         const ShardOptions& options) {
  if (options.sum_order == SumOrder::kNative)
    return std::make_unique<NativeExchange>(group, number, slices, options);
  return std::make_unique<OrderedExchange>(group, number, slices, options);
}

}  // namespace reef
