// What becomes of .grad: of parameters, and of the parts that have gradients in their place.
#include <ATen/core/grad_mode.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"
#include "shard/reducer.h"
#include "shard/stand_in.h"

namespace reef {

using at::Tensor;

// What the program has made of the parameter's gradient since the last pass, where parts have it. A gradient
// of its own is added to, as ever, in place of what there was.
void Reducer::see(Item& item) {
  if (std::exchange(item.seen, true)) return;
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  const bool stands_in = gradient.defined() && gradient.is_same(item.stand_in);
  item.cleared = item.stand_in.defined() && !stands_in;
  if (item.cleared) item.filled = false;  // a sum of passes in no_sync, too
  item.kept = gradient;
  if (stands_in) gradient = Tensor();
}

Tensor Reducer::stand_in_of(Item& item) const {
  if (!item.stand_in.defined()) {
    item.stand_in =
        stand_in(item.parameter.tensor, "the gradient of parameter " + item.parameter.name +
                                            " is divided among the ranks, or its master's (reef::shard): "
                                            "give the optimizer parameters() of the "
                                            "shard, and take the norm of those by reef::clip_grad_norm");
  }
  return item.stand_in;
}

// What has been reduced before this pass must not be added up over the ranks once more.
void Reducer::keep(std::size_t number) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  begin_pass();
  Item& item = items_[number];
  if (has_parts()) return see(item);
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  if (!gradient.defined()) item.filled = false;  // a sum of passes in no_sync was cleared
  if (!gradient.defined() || item.filled) return;
  item.kept = same_storage(gradient, buckets_[item.place.bucket].flat) ? gradient.clone() : gradient;
  gradient = Tensor();
}

// Gradients of parts that have been kept since the last step may lie where sums are about to be.
void Reducer::free_flats() {
  if (divides_gradients()) return;
  for (KeptPart& part : parts_) {
    Tensor& gradient = part.tensor.mutable_grad();
    if (same_storage(gradient, buckets_[part.piece.bucket].flat)) gradient = gradient.clone();
  }
}

void Reducer::take(Item& item) {
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  if (gradient.layout() != c10::kStrided) {
    throw ConfigError("rank " + std::to_string(group_->getRank()) + ": parameter " + item.parameter.name +
                      " has a sparse gradient, which is not reduced; make its layer dense (sparse=False).");
  }
  const Tensor place = place_of(item);
  if (!same_memory(gradient, place)) {
    if (item.filled) {
      place.add_(gradient);
    } else {
      place.copy_(gradient);
    }
    // Frees what autograd had made. A sharded parameter has no gradient of its own.
    gradient = has_parts() ? Tensor() : place;  // the stand-in comes at the end of the pass
  }
  item.filled = true;
}

// This rank has no gradient of it.
void Reducer::leave_out(Item& item) {
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  const Tensor place = place_of(item);
  if (gradient.defined() && same_memory(gradient, place)) gradient = gradient.clone();
  place.zero_();
}

void Reducer::give_gradients(const std::vector<bool>& used) {
  if (!has_parts()) {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (!used[i]) continue;
      Item& item = items_[i];
      Tensor& gradient = item.parameter.tensor.mutable_grad();
      const Tensor place = place_of(item);
      const Tensor& before = item.filled ? item.kept : gradient;
      if (before.defined()) place.add_(before);
      gradient = place;
    }
    return;
  }
  clear_parts();
  for (std::size_t i = 0; i < items_.size(); ++i) give_stand_in(items_[i], used[i]);
  for (KeptPart& part : parts_) {
    if (!used[part.piece.item]) continue;
    const ShardPiece& piece = part.piece;
    const std::int64_t begin =
        sharded() ? group_->getRank() % layout_.ranks * layout_.buckets[piece.bucket].slice_elements : 0;
    const Tensor reduced =
        alias(buckets_[piece.bucket].own, piece.offset - begin, part.tensor.sizes(), part.tensor.strides());
    Tensor& gradient = part.tensor.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(reduced);
    } else {
      gradient = reduced.to(part.tensor.scalar_type());
    }
  }
}

// Of parameters whose gradients the program has cleared.
void Reducer::clear_parts() {
  for (KeptPart& part : parts_) {
    if (items_[part.piece.item].cleared) part.tensor.mutable_grad().reset();
  }
}

// Where there are parts, at the end of a pass. `added`: it has added to the parameter's gradient.
void Reducer::give_stand_in(Item& item, bool added) const {
  if (!has_parts()) return;
  item.parameter.tensor.mutable_grad() = added ? stand_in_of(item) : item.kept;
}

}  // namespace reef
