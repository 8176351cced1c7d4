#pragma once

#include <torch/custom_class.h>

#include <utility>

#include "reef/shard.h"

namespace reef::bind {

/// Options of a shard, as Python gives them.
struct ShardOptions final : torch::CustomClassHolder {
  explicit ShardOptions(reef::ShardOptions given) : options(std::move(given)) {}
  reef::ShardOptions options;
};

/// Of an operator's argument: it is Any in schemas, which may be read before the class is registered.
inline const reef::ShardOptions& shard_options_of(const c10::IValue& given) {
  return given.toCustomClass<ShardOptions>()->options;
}

}  // namespace reef::bind
