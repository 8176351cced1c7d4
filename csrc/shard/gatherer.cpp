#include "shard/gatherer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_map>

#include "distributed/host_numbers.h"
#include "distributed/members.h"
#include "kernels/optim_step.h"
#include "kernels/sum_of_squares.h"
#include "observer/call.h"
#include "page/pinned.h"
#include "page/storage_access.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "reef/part.h"
#include "shard/agreement.h"
#include "unrecorded.h"

namespace reef {

using at::Tensor;

// So that a part is stepped, and has a norm, as in the whole.
static_assert(kShardAlignment % kernels::kTileElements == 0);
static_assert(kShardAlignment % kernels::kSquaresTogether == 0);

/// Hears of operators for all gatherers.
class Gatherer::Listener final : public OperatorListener {
 public:
  struct Memory {
    Gatherer* gatherer;
    std::size_t bucket;
    Touched what;
  };
  void add(const Tensor& flat, const Memory& memory) {
    const std::lock_guard lock(mutex_);
    memories_[flat.storage().unsafeGetStorageImpl()] = memory;
  }
  void remove(const Gatherer& gatherer) {
    const std::lock_guard lock(mutex_);
    std::erase_if(memories_, [&](const auto& entry) { return entry.second.gatherer == &gatherer; });
  }

  bool begins(OperatorCall& call) override {
    if (!call.op.touches_memory()) return false;
    std::vector<std::pair<Gatherer*, std::vector<Touch>>> touched;
    const auto inputs = call.call.inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      any_tensor(inputs[i], [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage()) see(tensor, call.op.writes(i), touched);
        return false;
      });
    }
    Running& running = this_threads();
    bool holds = false;
    for (auto& [gatherer, touches] : touched) {
      if (!gatherer->begins(call, touches)) continue;
      holds = true;
      running.held.emplace_back(gatherer, std::move(touches));
    }
    if (holds) ++running.depth;
    return holds;
  }

  void ends(OperatorCall&) noexcept override {
    Running& running = this_threads();
    if (--running.depth > 0) return;
    for (const auto& [gatherer, touches] : running.held) gatherer->ends(touches);
    running.held.clear();
  }

 private:
  struct Running {
    int depth = 0;  ///< of operators that hold something
    std::vector<std::pair<Gatherer*, std::vector<Touch>>> held;
  };
  static Running& this_threads() {
    static thread_local Running running;
    return running;
  }

  void see(const Tensor& tensor, bool writes,
           std::vector<std::pair<Gatherer*, std::vector<Touch>>>& touched) {
    const std::shared_lock lock(mutex_);
    const auto found = memories_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == memories_.end()) return;
    const auto& [gatherer, bucket, what] = found->second;
    auto of = std::find_if(touched.begin(), touched.end(),
                           [&, g = gatherer](const auto& entry) { return entry.first == g; });
    if (of == touched.end()) of = touched.insert(of, {gatherer, {}});
    of->second.push_back({bucket, what, writes});
  }

  std::shared_mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
};

Gatherer::Listener& Gatherer::listener() {
  static auto* const only = new Listener;
  return *only;
}

namespace {

// A bucket's parameters in memory of this dtype.
Tensor packed(const std::vector<Tensor>& parameters, const FlatBucket& bucket, std::int64_t elements,
              at::ScalarType dtype) {
  const Tensor& like = parameters[bucket.places().front().item];
  Tensor flat = at::zeros({elements}, like.options().requires_grad(false).dtype(dtype));
  for (const FlatPlace& place : bucket.places()) place.of(flat).copy_(parameters[place.item]);
  return flat;
}

// Memory for parts, with these values.
Tensor kept(const Tensor& own, bool on_host) {
  if (!on_host || own.is_cpu()) return own.clone();
  return empty_on_host(own).copy_(own);
}

}  // namespace

Gatherer::Gatherer(const std::vector<Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
                   int exchange, const ShardOptions& options, const std::function<void(FlatBucket&)>& moved)
    : layout_(std::move(layout)),
      options_(options),
      place_(layout_.place_of(group->getRank())),
      divided_(options.stage != Stage::kReplicate),
      device_(device_of(parameters)),
      exchange_(group, exchange, layout_.ranks),
      lane_(make_comm_lane(*group, device_)),
      name_(shard_name(exchange)) {
  buckets_.reserve(layout_.buckets.size());
  for (std::size_t number = 0; number < layout_.buckets.size(); ++number) {
    buckets_.push_back(move(parameters, number));
    keep_parts(parameters, number);
    moved(buckets_.back());
  }
}

Gatherer::~Gatherer() { listener().remove(*this); }

FlatBucket Gatherer::move(const std::vector<Tensor>& parameters, std::size_t number) const {
  const at::NoGradGuard no_grad;
  const CategoryScope category(Category::kParameter);
  const auto tensor_of = [&](std::size_t item) -> const Tensor& { return parameters[item]; };
  const at::ScalarType given = tensor_of(layout_.buckets[number].items.front().item).scalar_type();
  const ParameterDtypes dtypes = dtypes_of(given, options_.mixed_precision);
  FlatBucket bucket = flat_bucket(layout_, number, dtypes.parameter, tensor_of);
  const std::int64_t elements = layout_.elements(number);
  const Tensor exact = packed(parameters, bucket, elements, dtypes.part);
  const Tensor whole = dtypes.has_masters() ? packed(parameters, bucket, elements, dtypes.parameter) : exact;
  for (const FlatPlace& place : bucket.places()) {
    Tensor parameter = parameters[place.item];
    parameter.mutable_grad().reset();  // parts have gradients in its place
    parameter.set_data(place.of(whole));
  }
  bucket.take(whole, kept(own_of(exact), options_.offload));
  return bucket;
}

void Gatherer::keep_parts(const std::vector<Tensor>& parameters, std::size_t number) {
  const Tensor& own = buckets_[number].own();
  if (!divided_) {  // they are all of the parameters
    const std::vector<ShardPiece>& pieces = layout_.buckets[number].items;
    for (std::size_t i = 0; i < pieces.size(); ++i)
      parts_.push_back({pieces[i], buckets_[number].places()[i].of(own).set_requires_grad(true)});
    return;
  }
  const std::int64_t begin = layout_.begin(number, place_.slice);
  for (const ShardPiece& piece : layout_.parts(number, place_.slice)) {
    const Tensor& whole = parameters[piece.item];
    const Tensor part = part_alias(own, piece.offset - begin, part_shape(whole, piece.elements));
    part.set_requires_grad(true);
    set_part(part, {piece.first, whole.numel(), place_.copy}, whole.sizes());
    parts_.push_back({piece, part});
  }
}

void Gatherer::write_back(const FlatBucket& bucket) const noexcept {
  try {
    const Unrecorded unrecorded;
    const Tensor own = own_of(bucket.whole());
    const Pinned pinned(bucket.own());
    const Tensor& master = pinned.tensor();
    if (own.scalar_type() == master.scalar_type()) {
      master.copy_(own);
    } else {  // what was not changed keeps the bits that rounding takes
      const Tensor written = own.to(master.device());
      master.copy_(
          at::where(master.to(own.scalar_type()).eq(written), master, written.to(master.scalar_type())));
    }
  } catch (const std::exception& error) {
    refuse_access(*bucket.own().storage().unsafeGetStorageImpl(), message_of(error));
  }
}

void Gatherer::confirm() {
  for (FlatBucket& bucket : buckets_) {
    if (bucket.state() == FlatBucket::State::kStale) bucket.confirm();
  }
}

void Gatherer::observe() {
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    listener().add(buckets_[number].whole(), {this, number, Touched::kWhole});
    listener().add(buckets_[number].own(), {this, number, Touched::kOwn});
  }
  observation_ = std::make_unique<OperatorObservation>(listener());
}

void Gatherer::close() {
  observation_.reset();
  listener().remove(*this);
  // All ranks have asked for the same. Whoever left out what it has not begun would leave the others waiting.
  if (lane_) lane_->drain();
  lane_.reset();
}

std::vector<std::int64_t> Gatherer::largest(const std::vector<std::int64_t>& here) {
  if (layout_.buckets.empty()) return here;
  note_call(*exchange_.group(), "the first use of parameters in step " + std::to_string(step_number_), name_);
  const c10::Device between = device_of_host_numbers(*exchange_.group(), device_);
  const Tensor told = page_locked(at::tensor(here, at::kLong), between);
  const std::uint64_t ticket =
      lane_->submit([this, told, between] { largest_of_hosts(exchange_, told, between); });
  await(*lane_, ticket);
  if (!between.is_cpu()) lane_->wait_on_host(ticket);
  const auto* const values = told.const_data_ptr<std::int64_t>();
  return {values, values + told.numel()};
}

}  // namespace reef
