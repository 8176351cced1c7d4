#include "shard/frozen16.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>

#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/ledger.h"
#include "shard/dtypes.h"
#include "shard/flat.h"

namespace reef {
namespace {

using at::Tensor;

bool is_rounded(const Tensor& parameter, const ShardOptions& options) {
  return parameter.scalar_type() == at::kFloat &&
         dtypes_of(parameter.scalar_type(), options.mixed_precision).parameter != at::kFloat;
}

// In one dimension, in the order of memory.
Tensor flat_of(const Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

}  // namespace

Frozen16::Frozen16(const Shard::Named& frozen, const ShardOptions& options, const ProcessGroupPtr& group) {
  const at::NoGradGuard no_grad;
  const CategoryScope category(Category::kParameter);
  std::vector<ShardItem> items;
  std::vector<Tensor> exact;
  std::map<const void*, std::vector<Tensor>> sharing;  // by storage
  for (const auto& [name, tensor] : frozen) {
    if (!is_rounded(tensor, options)) continue;
    divided_.parameters.push_back({name, tensor});
    exact.push_back(tensor.detach());
    items.push_back({tensor.numel(), static_cast<std::int64_t>(sizeof(float)), 0});
    sharing[tensor.storage().unsafeGetStorageImpl()].push_back(tensor);
  }
  const int degree = options.shard_degree != 0 ? options.shard_degree : group->getSize();
  divided_.layout = plan_shards(items, degree, options.bucket_bytes);
  divided_.divided = options.stage != Stage::kReplicate;
  divided_.group = group;
  for (std::size_t bucket = 0; bucket < divided_.layout.buckets.size(); ++bucket) {
    for (const KeptElements& place : divided_.kept(bucket)) {
      const Tensor own = flat_of(exact[place.item]).slice(0, place.first, place.last);
      kept_.push_back(
          {place, options.offload && !own.is_cpu() ? empty_on_host(own).copy_(own) : own.clone()});
    }
  }
  exact.clear();
  for (auto& [storage, tensors] : sharing) {
    dtype_ = options.mixed_precision->parameters;
    if (tensors.size() == 1) {
      tensors[0].set_data(tensors[0].detach().to(dtype_));
      continue;
    }
    const Tensor all = all_of(c10::Storage(tensors[0].storage()), tensors[0], at::kFloat).to(dtype_);
    for (Tensor& tensor : tensors)
      tensor.set_data(alias(all, tensor.storage_offset(), tensor.sizes(), tensor.strides()));
  }
}

// This rank's elements of what the module has.
Tensor Frozen16::rounded(const Kept& kept) const {
  return flat_of(divided_.parameters[kept.place.item].tensor.detach())
      .slice(0, kept.place.first, kept.place.last);
}

NamedState Frozen16::own() const {
  const at::NoGradGuard no_grad;
  NamedState all;
  for (const Kept& kept : kept_) {
    const Tensor now = rounded(kept);
    Tensor value = now.to(at::kFloat);
    if (now.scalar_type() == dtype_) {
      const Tensor exact = kept.exact.to(now.device());
      const Tensor unwritten = exact.to(dtype_).view(at::kShort).eq(now.view(at::kShort));
      value = at::where(unwritten, exact, value);
    }
    const Tensor& whole = divided_.parameters[kept.place.item].tensor;
    value = divided_.divided ? value.view(part_shape(whole, value.numel()))
                             : value.as_strided(whole.sizes(), whole.strides());
    all.push_back({kept.place.name, {{"", value}}});
  }
  return all;
}

Frozen16::Loaded Frozen16::prepared(const NamedState& whole) const {
  const at::NoGradGuard no_grad;
  std::map<std::string, Tensor> values;
  for (const auto& [name, value] : whole) values.emplace(name, value.front().second.toTensor());
  Loaded loaded;
  for (const auto& [name, tensor] : divided_.parameters) loaded.whole.push_back(values.at(name));
  for (const Kept& kept : kept_) {
    const Tensor& like = divided_.parameters[kept.place.item].tensor;
    const Tensor ordered = at::empty_strided(like.sizes(), like.strides(), kept.exact.options());
    ordered.copy_(loaded.whole[kept.place.item]);
    loaded.kept.push_back(flat_of(ordered).slice(0, kept.place.first, kept.place.last).clone());
  }
  return loaded;
}

void Frozen16::load(const Loaded& loaded) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < loaded.whole.size(); ++i)
    divided_.parameters[i].tensor.detach().copy_(loaded.whole[i]);
  for (std::size_t i = 0; i < kept_.size(); ++i) kept_[i].exact = loaded.kept[i];
}

}  // namespace reef
