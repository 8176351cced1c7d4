#include "reef/shard.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_set>
#include <utility>

#include "distributed/call_order.h"
#include "distributed/members.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "shard/agreement.h"
#include "shard/check_options.h"
#include "shard/choose_compression.h"
#include "shard/dtypes.h"
#include "shard/gatherer.h"
#include "shard/module_now.h"
#include "shard/one_bit_adam_exchange.h"
#include "shard/reducer.h"
#include "shard/shard_parts.h"
#include "shard/shared_memory.h"

namespace reef {

using at::Tensor;

namespace {

// Without those that come again under another name.
Shard::Named without_repetition(const Shard::Named& given) {
  Shard::Named once;
  std::unordered_set<const void*> seen;
  for (const auto& named : given) {
    if (named.second.defined() && seen.insert(named.second.unsafeGetTensorImpl()).second)
      once.push_back(named);
  }
  return once;
}

// Without those that are left to each rank.
Shard::Named without_ignored(const Shard::Named& given, const std::vector<Tensor>& ignored) {
  Shard::Named kept = given;
  for (std::size_t i = 0; i < ignored.size(); ++i) {
    const auto found = std::find_if(kept.begin(), kept.end(), [&](const auto& named) {
      return named.second.unsafeGetTensorImpl() == ignored[i].unsafeGetTensorImpl();
    });
    if (found == kept.end()) {
      throw ConfigError("reef::shard was given number " + std::to_string(i) +
                        " of the ignored tensors, which is no parameter of the module or comes twice: give "
                        "parameters.");
    }
    kept.erase(found);
  }
  return kept;
}

void broadcast_all(const Shard::Named& parameters, const Shard::Named& buffers,
                   const ProcessGroupPtr& group) {
  const at::NoGradGuard no_grad;
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor.detach());
  for (const auto& [name, tensor] : buffers) tensors.push_back(tensor);
  broadcast(tensors, group);
}

}  // namespace

void Shard::Parts::wait_for_update() const {
  if (update != nullptr) update->wait();
}
void Shard::Parts::finish_update() const {
  if (update != nullptr) update->finish();
}

// What becomes of the module's buffers when gradients have been reduced.
void Shard::Parts::make_alike(const ProcessGroupPtr& over) {
  if (options.buffers == Buffers::kLocal) return;
  look_at_buffers();
  std::vector<Tensor> of_first, of_all;
  for (const auto& [name, tensor] : without_repetition(all_buffers)) {
    const bool has_mean = options.buffers == Buffers::kMean && tensor.is_floating_point();
    (has_mean ? of_all : of_first).push_back(tensor);
  }
  if (!of_all.empty()) all_reduce(of_all, over, Reduction::kMean);
  if (!of_first.empty()) broadcast(of_first, over);
}

Shard::Shard(const Named& all_parameters, const Named& all_buffers, ProcessGroupPtr group,
             const ShardOptions& given, ModuleNow module_now)
    : parts_(std::make_unique<Parts>()) {
  ShardOptions options = given;
  if (!group)
    throw ConfigError("reef::shard was given no process group: make one with reef::init_process_group.");
  Named parameters = without_repetition(all_parameters);
  const Named buffers = without_repetition(all_buffers);
  std::string wrong;
  try {
    parameters = without_ignored(parameters, options.ignored);
    check_options(CallsMade::kShardBegins, parameters, options, group);
    check_memory_is_apart(all_parameters, all_buffers, options);
  } catch (const ConfigError& error) {
    wrong = message_of(error);
  }
  const int exchange =
      check_agreement(CallsMade::kShardBegins, parameters, buffers, group, options, wrong, parts_->exchanges);
  parts_->shard = shard_name(exchange);
  broadcast_all(parameters, buffers, group);

  // Backward comes to the last first.
  std::vector<ReducedParameter> reduced;
  std::vector<Tensor> tensors;
  std::vector<ShardItem> items;
  std::map<at::ScalarType, int> kinds;
  for (auto it = parameters.rbegin(); it != parameters.rend(); ++it) {
    const auto& [name, tensor] = *it;
    if (!tensor.requires_grad()) {
      parts_->frozen.push_back(*it);
      continue;
    }
    parts_->claimed.add(tensor);
    reduced.push_back({name, tensor});
    tensors.push_back(tensor);
    const ParameterDtypes dtypes = dtypes_of(tensor.scalar_type(), options.mixed_precision);
    const int kind = kinds.emplace(dtypes.parameter, static_cast<int>(kinds.size())).first->second;
    items.push_back({tensor.numel(), static_cast<std::int64_t>(c10::elementSize(dtypes.sum)), kind});
  }
  parts_->frozen16 = Frozen16(parts_->frozen, options, group);
  const int degree = options.shard_degree != 0 ? options.shard_degree : group->getSize();
  const ShardLayout layout = plan_shards(items, degree, options.bucket_bytes);
  if (options.compression == Compression::kAuto)
    parts_->prices = choose_compression(group, layout, tensors, options);
  parts_->all_parameters = all_parameters;
  parts_->all_buffers = all_buffers;
  parts_->module_now = std::move(module_now);
  parts_->options = options;
  parts_->divided = {reduced, layout, options.stage != Stage::kReplicate, group};
  const auto give_momentum = [&] {
    if (options.compression != Compression::kOneBitAdam) return;
    parts_->momentum =
        std::make_shared<GivenMomentum>(options.compression_options.beta1.at(0, OneBitAdamExchange::kBeta1));
    for (const Tensor& parameter : parts_->parameters) parts_->with_momentum.add(parameter, parts_->momentum);
    parts_->reducer->give_momentum_by(parts_->momentum);
  };
  if (!has_parts(options)) {
    for (auto it = reduced.rbegin(); it != reduced.rend(); ++it) {
      parts_->parameters.push_back(it->tensor);
      parts_->names.push_back(it->name);
    }
    Reducer& reducer = parts_->reducer.emplace(std::move(reduced), layout, group, exchange + 1, options);
    reducer.when_reducing([parts = parts_.get()] { parts->check_parameters(); });
    reducer.when_reduced([parts = parts_.get()](bool over_ranks) {
      if (over_ranks) parts->make_alike(parts->divided.group);
    });
    give_momentum();
    return;
  }
  parts_->gatherer = options.stage == Stage::kParameters
                         ? gather_on_demand(tensors, layout, group, exchange, options)
                         : gather_after_steps(tensors, layout, group, exchange, options);
  Gatherer& gatherer = *parts_->gatherer;
  gatherer.begin_step(1);
  std::vector<KeptPart> in_order = gatherer.parts();  // of the module
  std::stable_sort(in_order.begin(), in_order.end(),
                   [](const KeptPart& a, const KeptPart& b) { return a.piece.item > b.piece.item; });
  for (const KeptPart& part : in_order) {
    const auto& [item, bucket, first, elements, offset] = part.piece;
    const std::string& name = reduced[item].name;
    parts_->parameters.push_back(part.tensor);
    parts_->names.push_back(parts_->divided.divided ? piece_name(name, first, first + elements) : name);
  }
  if (parts_->divided.divided && layout.ranks > 1) parts_->norms.emplace(parts_->parameters);
  Reducer& reducer = parts_->reducer.emplace(std::move(reduced), layout, group, exchange + 1, options);
  for (const ReducedParameter& one : parts_->divided.parameters)
    parts_->memory.push_back(one.tensor.storage());
  reducer.set_parts(gatherer.parts());
  give_momentum();
  if (options.stage == Stage::kParameters && gatherer.answer()) {
    reducer.answer_gathers({[&gatherer] { gatherer.answer(); }, [&gatherer] { gatherer.tell_failed(); },
                            [&gatherer] { gatherer.abandon_pass(); }});
  }
  reducer.when_reducing([parts = parts_.get()] { parts->check_parameters(); });
  reducer.when_reduced([parts = parts_.get()](bool over_ranks) {
    if (over_ranks) parts->make_alike(parts->divided.group);
    parts->gatherer->begin_step(parts->reducer->step());
    parts->gatherer->expect_step();
  });
}

Shard::~Shard() = default;
Shard::Shard(Shard&&) noexcept = default;
Shard& Shard::operator=(Shard&&) noexcept = default;

const std::vector<Tensor>& Shard::parameters() const { return parts_->parameters; }
const std::vector<std::string>& Shard::names() const { return parts_->names; }

void Shard::Parts::note(const char* call) const { note_call(*divided.group, call, shard); }
Shard::Parts::~Parts() {
  if (divided.group) note_shard_ends(*divided.group, shard);
}

void Shard::gather() {
  parts_->note("gather()");
  agree(parts_->divided, [&] { parts_->check_module(); });
  parts_->finish_update();
  if (parts_->gatherer) parts_->gatherer->gather();
}

const std::vector<NonFiniteElements>& Shard::nonfinite_gradients() const {
  if (compression() == Compression::kNone) {
    throw ConfigError(
        "nonfinite_gradients() was called on a shard without a compression, where what is not finite arrives "
        "as it is: look for it in the gradients (reef::count_nonfinite).");
  }
  return parts_->reducer->nonfinite();
}

void Shard::clear_gradients() { parts_->reducer->clear_as_the_module(); }

std::int64_t Shard::resident_bytes() const {
  return parts_->gatherer ? parts_->gatherer->resident_bytes() : 0;
}

Compression Shard::compression() const { return parts_->options.compression; }
const std::optional<ExchangePrices>& Shard::compression_prices() const { return parts_->prices; }

std::int64_t Shard::sent_bytes() const {
  return parts_->reducer->sent_bytes() + (parts_->gatherer ? parts_->gatherer->sent_bytes() : 0);
}

Shard::NoSync::NoSync(Shard& shard) : parts_(*shard.parts_) {
  if (parts_.no_sync++ == 0) parts_.reducer->set_syncing(false);
}
Shard::NoSync::~NoSync() {
  if (--parts_.no_sync == 0) parts_.reducer->set_syncing(true);
}

Shard shard(torch::nn::Module& module, const ProcessGroupPtr& group, const ShardOptions& options) {
  return {named(module.named_parameters()), named(module.named_buffers()), group, options, look_at(module)};
}

}  // namespace reef
