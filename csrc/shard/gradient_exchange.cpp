#include "shard/gradient_exchange.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>

#include "shard/dgc_exchange.h"
#include "shard/gtop_k_exchange.h"
#include "shard/gtop_k_tree_exchange.h"
#include "shard/native_exchange.h"
#include "shard/ok_top_k_exchange.h"
#include "shard/one_bit_adam_exchange.h"
#include "shard/ordered_exchange.h"
#include "shard/power_sgd_exchange.h"
#include "shard/qsgd_exchange.h"
#include "shard/sign_exchange.h"
#include "shard/sixteen_bit_exchange.h"
#include "shard/top_k_exchange.h"

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
  const auto make = [&]<class Exchange>(std::type_identity<Exchange>,
                                        auto... more) -> std::unique_ptr<GradientExchange> {
    return std::make_unique<Exchange>(group, number, slices, options, more...);
  };
  using std::type_identity;
  switch (options.compression) {
    case Compression::kBFloat16:
      return make(type_identity<SixteenBitExchange>(), at::kBFloat16);
    case Compression::kFloat16:
      return make(type_identity<SixteenBitExchange>(), at::kHalf);
    case Compression::kQsgd:
      return make(type_identity<QsgdExchange>());
    case Compression::kSign:
      return make(type_identity<SignExchange>());
    case Compression::kPowerSgd:
      return make(type_identity<PowerSgdExchange>(), /*alternating=*/false);
    case Compression::kPowerSgdAlternating:
      return make(type_identity<PowerSgdExchange>(), /*alternating=*/true);
    case Compression::kTopK:
      return make(type_identity<TopKExchange>());
    case Compression::kGTopK:
      return make(type_identity<GTopKExchange>());
    case Compression::kGTopKTree:
      return make(type_identity<GTopKTreeExchange>());
    case Compression::kOkTopK:
      return make(type_identity<OkTopKExchange>());
    case Compression::kDgc:
      return make(type_identity<DgcExchange>());
    case Compression::kOneBitAdam:
      return make(type_identity<OneBitAdamExchange>());
    case Compression::kAuto:  // shard() has made another of it
    case Compression::kNone:
      break;
  }
  if (options.sum_order == SumOrder::kNative) return make(type_identity<NativeExchange>());
  return make(type_identity<OrderedExchange>());
}

}  // namespace reef
