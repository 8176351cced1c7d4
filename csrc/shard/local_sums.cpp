// Steps with a rank's own gradients, and the mean of what they have made of the parameters.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "alias.h"
#include "distributed/slice_sum.h"
#include "page/pinned.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/shard_parts.h"

namespace reef {
namespace {

using at::Tensor;

void refuse_divided(const DividedParameters& all, const std::string& what) {
  if (!all.divided) return;
  throw ConfigError(
      what +
      " was called at a stage that divides parameters among the ranks, where one's own step is a "
      "step of its part alone: take stage kReplicate.");
}

}  // namespace

Shard::LocalSums::LocalSums(Shard& shard) : parts_(*shard.parts_) {
  refuse_divided(parts_.divided, "local_sums");
  if (parts_.options.compression == Compression::kOneBitAdam) {
    throw ConfigError(
        "local_sums was called with compression one_bit_adam, whose optimizer steps by what ranks exchange: "
        "shard with another compression.");
  }
  if (parts_.local_sums++ == 0) parts_.reducer->set_local(true);
}
Shard::LocalSums::~LocalSums() {
  if (--parts_.local_sums == 0) parts_.reducer->set_local(false);
}

void Shard::average_parameters() {
  const at::NoGradGuard no_grad;
  Parts& parts = *parts_;
  const DividedParameters& all = parts.divided;
  refuse_divided(all, "average_parameters");
  agree(all, [&] { parts.check_module(); });
  parts.finish_update();
  if (parts.gatherer) parts.gatherer->expect_step();     // parts are written, as by an optimizer
  const std::size_t last = parts.parameters.size() - 1;  // items are the module's last first
  for (std::size_t bucket = 0; bucket < all.layout.buckets.size(); ++bucket) {
    const std::vector<ShardPiece>& places = all.layout.buckets[bucket].items;
    const CategoryScope communication(Category::kCommunication);
    const Tensor& first = parts.parameters[last - places.front().item];
    const Tensor flat =
        at::zeros({all.layout.elements(bucket)}, first.options().device(all.device()).requires_grad(false));
    const Pinned pinned(flat);
    const auto each = [&](const auto& copy) {
      for (const ShardPiece& place : places) {
        const Tensor& own = parts.parameters[last - place.item];
        copy(own, alias(flat, place.offset, own.sizes(), own.strides()));
      }
    };
    each([](const Tensor& own, const Tensor& place) { place.copy_(own); });
    SliceSum(parts.reducer->exchange_of(bucket).ranks()).all_reduce(flat, Reduction::kMean);
    each([](const Tensor& own, const Tensor& place) { own.copy_(place); });
  }
  parts.make_alike(all.group);
}

}  // namespace reef
