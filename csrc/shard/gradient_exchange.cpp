#include "shard/gradient_exchange.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "shard/bfloat16_exchange.h"
#include "shard/native_exchange.h"
#include "shard/ordered_exchange.h"

namespace reef {

GradientExchange::GradientExchange(const ProcessGroupPtr& group, int number, int slices,
                                   const ShardOptions& options, ExchangeMemory memory)
    : ranks_(group, number, slices),
      memory_(std::move(memory)),
      reduction_(options.reduction),
      divided_(options.stage != Stage::kReplicate) {}

GradientExchange::~GradientExchange() = default;

void GradientExchange::end_step(bool used) {
  if (used) {
    memory_.keep_step();
  } else {
    memory_.forget_step();
  }
}

std::unique_ptr<GradientExchange> make_gradient_exchange(const ProcessGroupPtr& group, int number, int slices,
                                                         const ShardOptions& options) {
  if (options.compression == Compression::kBFloat16)
    return std::make_unique<Bfloat16Exchange>(group, number, slices, options);
  if (options.sum_order == SumOrder::kNative)
    return std::make_unique<NativeExchange>(group, number, slices, options);
  return std::make_unique<OrderedExchange>(group, number, slices, options);
}

}  // namespace reef
