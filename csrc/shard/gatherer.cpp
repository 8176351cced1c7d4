#include "shard/gatherer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <shared_mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "observer/call.h"
#include "page/storage_access.h"
#include "reef/error.h"
#include "reef/ledger.h"

namespace reef {

using at::Tensor;

/// Hears of operators for all gatherers.
class Gatherer::Listener final : public OperatorListener {
 public:
  void add(Gatherer& gatherer) {
    const std::lock_guard lock(mutex_);
    for (const auto& [parameter, bucket] : gatherer.bucket_of_) parameters_[parameter] = {&gatherer, bucket};
    for (const Tensor& flat : gatherer.flats_) storages_[flat.storage().unsafeGetStorageImpl()] = &gatherer;
  }
  void remove(const Gatherer& gatherer) {
    const std::lock_guard lock(mutex_);
    for (const auto& [parameter, bucket] : gatherer.bucket_of_) parameters_.erase(parameter);
    for (const Tensor& flat : gatherer.flats_) storages_.erase(flat.storage().unsafeGetStorageImpl());
  }

  bool begins(OperatorCall& call) override {
    const auto inputs = call.call.inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      any_tensor(inputs[i], [&](const Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage()) see(tensor, call.op.writes(i), call.records_gradient);
        return false;
      });
    }
    return false;
  }
  void ends(OperatorCall&) noexcept override {}

 private:
  struct Place {
    Gatherer* gatherer;
    std::size_t bucket;
  };
  // Optimizers may write through aliases of a part, so a write is known by its memory.
  void see(const Tensor& tensor, bool writes, bool in_forward) {
    std::shared_lock lock(mutex_);
    const auto storage = storages_.find(tensor.storage().unsafeGetStorageImpl());
    if (storage == storages_.end()) return;
    if (writes) storage->second->wrote();
    const auto found = parameters_.find(tensor.unsafeGetTensorImpl());
    if (found == parameters_.end()) return;
    const Place place = found->second;
    lock.unlock();
    place.gatherer->read(place.bucket, in_forward);
  }

  std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Place> parameters_;
  std::unordered_map<const c10::StorageImpl*, Gatherer*> storages_;
};

Gatherer::Listener& Gatherer::listener() {
  static auto* const only = new Listener;
  return *only;
}

Gatherer::Gatherer(const std::vector<Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group)
    : layout_(std::move(layout)),
      tickets_(layout_.buckets.size(), 0),
      on_its_way_(layout_.buckets.size()),
      exchange_(group, 1) {
  const at::NoGradGuard no_grad;
  const CategoryScope category(Category::kParameter);
  for (std::size_t bucket = 0; bucket < layout_.buckets.size(); ++bucket) {
    const std::vector<ShardPiece>& items = layout_.buckets[bucket].items;
    const at::TensorOptions options = parameters[items.front().item].options().requires_grad(false);
    const Tensor& flat = flats_.emplace_back(at::zeros({layout_.elements(bucket)}, options));
    for (const ShardPiece& place : items) {
      Tensor parameter = parameters[place.item];
      const Tensor moved = alias(flat, place.offset, parameter.sizes(), parameter.strides());
      moved.copy_(parameter);
      parameter.set_data(moved);
      bucket_of_[parameter.unsafeGetTensorImpl()] = bucket;
    }
    for (const ShardPiece& piece : layout_.pieces(bucket, group->getRank())) {
      parts_.push_back({piece, alias(flat, piece.offset, piece.elements).set_requires_grad(true)});
    }
  }
  listener().add(*this);
  observation_ = std::make_unique<OperatorObservation>(listener());
}

Gatherer::~Gatherer() {
  observation_.reset();
  listener().remove(*this);
}

// An operator is about to read a parameter of this bucket. Where that fails, the operator does, when it asks
// for the memory: an error thrown here would not be heard of.
void Gatherer::read(std::size_t bucket, bool in_forward) noexcept {
  if (!expecting_ && !coming_) return;
  const std::lock_guard lock(mutex_);
  try {
    if (expecting_ && written_anywhere()) {
      start();
    } else if (in_forward) {
      expecting_ = false;  // the step was left out: from here on ranks may read different parameters
    }
    wait(bucket);
  } catch (const std::exception& error) {
    refuse(error);
  }
}

void Gatherer::wrote() {
  written_ = true;
  expecting_ = true;
}

void Gatherer::gather() {
  const std::lock_guard lock(mutex_);
  start();
  for (std::size_t bucket = 0; bucket < flats_.size(); ++bucket) wait(bucket);
}

bool Gatherer::written_anywhere() {
  if (flats_.empty()) return false;
  const Tensor flag = at::full({1}, written_ ? 1 : 0, flats_.front().options().dtype(at::kByte));
  lane_.wait(lane_.submit([this, flag] { exchange_.any(flag); }));
  return flag.item<std::uint8_t>() != 0;
}

void Gatherer::start() {
  for (std::size_t bucket = 0; bucket < flats_.size(); ++bucket) wait(bucket);
  expecting_ = written_ = false;
  coming_ = true;
  // Buckets are in the order of backward; forward reads them in the other.
  for (std::size_t bucket = flats_.size(); bucket-- > 0;) {
    on_its_way_[bucket] = std::make_unique<Pinned>(flats_[bucket]);
    tickets_[bucket] = lane_.submit([this, flat = flats_[bucket]] { exchange_.all_gather(flat); });
  }
}

void Gatherer::wait(std::size_t bucket) {
  if (tickets_[bucket] == 0) return;
  lane_.wait(tickets_[bucket]);
  tickets_[bucket] = 0;
  on_its_way_[bucket].reset();
  coming_ = std::any_of(tickets_.begin(), tickets_.end(), [](std::uint64_t ticket) { return ticket != 0; });
}

void Gatherer::refuse(const std::exception& error) noexcept {
  for (const Tensor& flat : flats_) refuse_access(*flat.storage().unsafeGetStorageImpl(), message_of(error));
}

}  // namespace reef
