#include "reef/ddp_hook.h"

#include <ATen/core/grad_mode.h>

#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "distributed/call_order.h"
#include "distributed/members.h"
#include "reef/error.h"
#include "shard/check_options.h"
#include "shard/choose_compression.h"
#include "shard/ddp_hook.h"
#include "shard/state_of_exchange.h"

namespace reef {
namespace {

using at::Tensor;

ShardOptions as_of_shard(const DdpHookOptions& given) {
  ShardOptions options;
  options.bucket_bytes = given.bucket_bytes;
  options.compression = given.compression;
  options.compression_options = given.compression_options;
  options.allow = given.allow;
  return options;
}

void check(const Shard::Named& parameters, const ShardOptions& options, const ProcessGroupPtr& group) {
  if (parameters.empty())
    throw ConfigError("reef::DdpHook was given no parameters: give those that are trained.");
  for (const auto& [name, tensor] : parameters) {
    if (tensor.is_cpu()) continue;
    throw ConfigError("reef::DdpHook was given parameter " + name + ", which is on " + tensor.device().str() +
                      ": it exchanges gradients on the CPU. Take reef::shard, or a hook of torch's.");
  }
  if (options.compression == Compression::kOneBitAdam) {
    throw ConfigError(
        "reef::DdpHook was given compression one_bit_adam, which gives a momentum to an optimizer that a "
        "hook "
        "does not know: take reef::shard, or another compression.");
  }
  check_options(CallsMade::kDdpHookBegins, parameters, options, group);
}

}  // namespace

DdpHook::Parts::Parts(const Shard::Named& parameters, const ProcessGroupPtr& group,
                      const DdpHookOptions& given)
    : options(as_of_shard(given)) {
  std::string wrong;
  try {
    check(parameters, options, group);
  } catch (const ConfigError& refusal) {
    wrong = message_of(refusal);
  }
  const int first =
      check_agreement(CallsMade::kDdpHookBegins, parameters, {}, group, options, wrong, exchanges);
  name = "DDP hook " + std::to_string(first);

  // Backward reaches the last parameters first.
  std::vector<Tensor> tensors;
  std::vector<ShardItem> laid_out;
  std::map<at::ScalarType, int> kinds;
  for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
    const auto& [parameter, tensor] = *it;
    item_of.emplace(tensor.unsafeGetTensorImpl(), laid_out.size());
    divided.parameters.push_back({parameter, tensor});
    const int kind = kinds.emplace(tensor.scalar_type(), static_cast<int>(kinds.size())).first->second;
    tensors.push_back(tensor);
    laid_out.push_back({tensor.numel(), static_cast<std::int64_t>(tensor.element_size()), kind});
  }
  divided.layout = plan_shards(laid_out, group->getSize(), options.bucket_bytes);
  divided.group = group;
  items.resize(laid_out.size());
  for (std::size_t bucket = 0; bucket < divided.layout.buckets.size(); ++bucket) {
    auto& of_bucket = places.emplace_back();
    for (const ShardPiece& piece : divided.layout.buckets[bucket].items) {
      items[piece.item].bucket = bucket;
      items[piece.item].place = of_bucket.size();
      const Tensor& tensor = divided.parameters[piece.item].tensor;
      of_bucket.push_back({piece.offset, tensor.sizes().vec(), tensor.strides().vec(), piece.item});
    }
    to_come.push_back(of_bucket.size());
  }
  if (options.compression == Compression::kAuto)
    prices = choose_compression(group, divided.layout, tensors, options);
  if (options.compression != Compression::kNone) search.emplace(places.size());
  for (const auto& [parameter, tensor] : parameters) claimed.add(tensor);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const int number = first + 1 + static_cast<int>(i);
    lines[i] = {make_gradient_exchange(group, number, divided.layout.ranks, options),
                make_comm_lane(*group, c10::kCPU)};
  }
}

DdpHook::Parts::~Parts() {
  note_shard_ends(*divided.group, name);
  for (const Line& line : lines) line.lane->drain();
}

DdpHook::DdpHook(const Shard::Named& parameters, const ProcessGroupPtr& group,
                 const DdpHookOptions& options) {
  if (!group)
    throw ConfigError("reef::DdpHook was given no process group: make one with reef::init_process_group.");
  parts_ = std::make_unique<Parts>(parameters, group, options);
}
DdpHook::~DdpHook() = default;

void DdpHook::exchange(const Tensor& buffer, c10::ArrayRef<Tensor> parameters, bool is_last) {
  const at::NoGradGuard no_grad;
  parts_->take(buffer, parameters, is_last);
}
void DdpHook::end_pass(const std::optional<Tensor>& used) {
  const at::NoGradGuard no_grad;
  parts_->end_pass(used);
}

OptimizerState::Communication DdpHook::state() const {
  parts_->rest();
  return StateOfExchange(parts_->divided, *parts_).own();
}
OptimizerState::Communication DdpHook::full_state(bool rank0_only) const {
  note_call(*parts_->divided.group, "state_dict()", parts_->name);
  agree(parts_->divided, [&] { parts_->rest(); });
  return StateOfExchange(parts_->divided, *parts_)
      .whole(/*keep=*/!rank0_only || parts_->divided.group->getRank() == 0);
}
void DdpHook::load_state(const std::vector<OptimizerState::Communication>& given) {
  note_call(*parts_->divided.group, "load_state_dict()", parts_->name);
  agree(parts_->divided, [&] { parts_->rest(); });
  StateOfExchange exchange(parts_->divided, *parts_);
  exchange.load(exchange.resharded(given));
}

const std::vector<NonFiniteElements>& DdpHook::nonfinite_gradients() const {
  if (!parts_->search) {
    throw ConfigError(
        "nonfinite_gradients() was called on a reef::DdpHook without a compression, where what is not finite "
        "arrives as it is: look for it in the gradients (reef::count_nonfinite).");
  }
  return parts_->nonfinite;
}

Compression DdpHook::compression() const { return parts_->options.compression; }
const std::optional<ExchangePrices>& DdpHook::compression_prices() const { return parts_->prices; }
std::int64_t DdpHook::sent_bytes() const {
  return parts_->lines[0].exchange->ranks().sent_bytes() + parts_->lines[1].exchange->ranks().sent_bytes();
}

}  // namespace reef
