#include "shard/outer_part.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/ledger.h"

namespace reef {
namespace {

using at::Tensor;

ShardLayout layout_of(const std::vector<OuterPart::Parameter>& parameters, int ranks,
                      std::int64_t bucket_bytes) {
  std::vector<ShardItem> items;
  std::map<at::ScalarType, int> kinds;
  for (const auto& [name, own] : parameters) {
    const int kind = kinds.emplace(own.scalar_type(), static_cast<int>(kinds.size())).first->second;
    items.push_back({own.numel(), static_cast<std::int64_t>(own.element_size()), kind});
  }
  return plan_shards(items, ranks, bucket_bytes);
}

// Of one rank, or of what all have added up: nothing is divided.
ShardOptions undivided(ShardOptions options) {
  options.stage = Stage::kReplicate;
  options.reduction = Reduction::kMean;
  options.shard_degree = 0;
  return options;
}

}  // namespace

OuterPart::OuterPart(std::vector<Parameter> parameters, const ProcessGroupPtr& group, int number,
                     const ShardOptions& exchange, const OuterRule& rule, c10::Device device)
    : parameters_(std::move(parameters)),
      rule_(rule),
      device_(device),
      group_(group),
      layout_(layout_of(parameters_, group->getSize(), exchange.bucket_bytes)),
      exchange_(make_gradient_exchange(group, number, layout_.ranks, undivided(exchange))),
      momentum_(parameters_.size()) {
  for (const ShardBucket& bucket : layout_.buckets) {
    auto& places = places_.emplace_back();
    for (const ShardPiece& piece : bucket.items) {
      const Tensor& own = parameters_[piece.item].own;
      places.push_back({piece.offset, own.sizes().vec(), own.strides().vec(), piece.item});
    }
  }
}

void OuterPart::each(std::size_t bucket, const Tensor& flat,
                     const std::function<void(std::size_t item, const Tensor& place)>& visit) const {
  for (const FlatPlace& place : places_[bucket]) visit(place.item, place.of(flat));
}

// What is between the places is zero.
Tensor OuterPart::flat_memory(std::size_t bucket) const {
  const CategoryScope communication(Category::kCommunication);
  const Tensor& like = parameters_[places_[bucket].front().item].own;
  return at::zeros({layout_.elements(bucket)}, like.options().device(device_).requires_grad(false));
}

void OuterPart::start() {
  const at::NoGradGuard no_grad;
  for (std::size_t bucket = 0; bucket < places_.size(); ++bucket) {
    const Pinned flat(flat_memory(bucket));
    each(bucket, flat.tensor(),
         [&](std::size_t item, const Tensor& place) { place.copy_(parameters_[item].own); });
    broadcast({flat.tensor()}, group_);
    each(bucket, flat.tensor(),
         [&](std::size_t item, const Tensor& place) { parameters_[item].own.copy_(place); });
  }
  if (rule_.is_mean) return;
  const CategoryScope states(Category::kOptimizerState);
  std::vector<Tensor> start;
  for (const auto& [name, own] : parameters_) start.push_back(own.detach().clone());
  start_ = std::move(start);
}

void OuterPart::begin(CommLane& lane, std::int64_t step) {
  const at::NoGradGuard no_grad;
  std::vector<std::shared_ptr<Pinned>> flats;
  std::vector<Tensor> used;
  for (std::size_t bucket = 0; bucket < places_.size(); ++bucket) {
    used.push_back(flat_memory(bucket));
    flats.push_back(std::make_shared<Pinned>(used.back()));
    each(bucket, used.back(), [&](std::size_t item, const Tensor& place) {
      const Tensor& own = parameters_[item].own;
      place.copy_(rule_.is_mean ? own : at::sub(start_[item], own));
    });
  }
  ticket_ = lane.submit(
      [this, step, flats] {
        const CategoryScope communication(Category::kCommunication);
        exchange_->begin_step(step);
        for (std::size_t bucket = 0; bucket < flats.size(); ++bucket) {
          const Tensor& flat = flats[bucket]->tensor();
          exchange_->exchange({bucket, flat, flat, places_[bucket]});
        }
        exchange_->end_step(/*used=*/true);
      },
      used);
  travelling_ = std::move(flats);
}

// Each product and sum is an operator of its own, and so rounded by itself: a fused one would be so in a
// vector and not in its rest, which depends on threads and sizes.
void OuterPart::apply(double mixing) {
  const at::NoGradGuard no_grad;
  for (std::size_t bucket = 0; bucket < places_.size(); ++bucket) {
    each(bucket, travelling_[bucket]->tensor(), [&](std::size_t item, const Tensor& place) {
      const Tensor& own = parameters_[item].own;
      Tensor shared = place.to(own.device());
      if (!rule_.is_mean) {
        Tensor step = shared;
        if (rule_.momentum != 0) {
          Tensor& momentum = momentum_[item];
          if (momentum.defined()) {
            momentum.mul_(rule_.momentum).add_(step);
          } else {
            const CategoryScope states(Category::kOptimizerState);
            momentum = step.clone();
          }
          step = rule_.nesterov ? momentum.mul(rule_.momentum).add_(step) : momentum;
        }
        shared = start_[item].sub_(step.mul(rule_.lr));
      }
      if (mixing == 0) {
        own.copy_(shared);
      } else {
        own.mul_(mixing).add_(shared.mul(1 - mixing));
      }
    });
  }
  travelling_.clear();
}

}  // namespace reef
