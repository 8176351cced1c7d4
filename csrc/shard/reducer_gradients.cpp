// What becomes of .grad: of parameters, and of the parts that have gradients in their place.
#include <ATen/core/grad_mode.h>

#include <limits>
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
  if (item.before != Before::kNotSeen) return;
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  const bool stands_in = gradient.defined() && gradient.is_same(item.stand_in);
  item.before = item.stand_in.defined() && !stands_in ? Before::kCleared : Before::kSeen;
  if (item.before == Before::kCleared) item.sum = Sum::kNone;  // of passes in no_sync, too
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

// After a pass in no_sync: the optimizer's gradients show nothing of what has been added up, and clearing
// them clears that, too.
void Reducer::watch_parts() {
  if (lent_) return;
  for (Part& part : parts_) {
    const Item& item = items_[part.piece.item];
    part.has_sums = item.sum != Sum::kNone;
    Tensor& gradient = part.tensor.mutable_grad();
    if (!part.has_sums || gradient.defined()) continue;
    if (!part.stand_in.defined()) {
      part.stand_in =
          stand_in(part.tensor, "the gradient of parameter " + item.parameter.name +
                                    " has been added up in no_sync and not over the ranks "
                                    "(reef::shard): run backward without no_sync before the step");
    }
    gradient = part.stand_in;
  }
}

// Before a pass. What the program has made of the parameters' own gradients since is what has been added up.
void Reducer::see_sums() {
  if (has_parts()) return see_parts();
  for (Item& item : items_) {
    const Tensor& gradient = item.parameter.tensor.grad();
    if (item.sum == Sum::kNone) continue;
    if (!gradient.defined()) {
      item.sum = Sum::kNone;
      item.kept.reset();
    } else if (!same_memory(gradient, place_of(item))) {
      place_of(item).copy_(gradient);
    }
  }
}

// Every rank has parts of all parameters, so what a program does alike on all ranks each of them sees.
void Reducer::see_parts() {
  for (Part& part : parts_) {
    if (!std::exchange(part.has_sums, false) || part.tensor.grad().defined()) continue;
    items_[part.piece.item].sum = Sum::kNone;
    clears_ = static_cast<std::uint8_t>(31 * clears_ + part.piece.item + 1);
  }
}

// None are left, nor what stands for them.
void Reducer::forget_sums() {
  for (Part& part : parts_) {
    part.has_sums = false;
    Tensor& gradient = part.tensor.mutable_grad();
    if (gradient.defined() && gradient.is_same(part.stand_in)) gradient.reset();
  }
  clears_ = 0;
  lost_sums_ = false;
}

// What has been reduced before this pass must not be added up over the ranks once more.
void Reducer::keep(std::size_t number) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (when_asked_) return;  // a graph that was there before keeps an accumulator, and this hook with it
  begin_gradients();
  Item& item = items_[number];
  if (has_parts()) return see(item);
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  if (!gradient.defined() || item.sum != Sum::kNone) return;
  item.kept = same_storage(gradient, buckets_[item.bucket].whole()) ? gradient.clone() : gradient;
  gradient = Tensor();
}

// Gradients of parts that have been kept since the last step may lie where sums are about to be.
void Reducer::free_flats() {
  if (divides_gradients()) return;
  for (Part& part : parts_) {
    Tensor& gradient = part.tensor.mutable_grad();
    if (same_storage(gradient, buckets_[part.piece.bucket].whole())) gradient = gradient.clone();
  }
}

void Reducer::take(Item& item) {
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  if (gradient.layout() != c10::kStrided) {
    throw ConfigError("rank " + std::to_string(group_->getRank()) + ": parameter " + item.parameter.name +
                      " has a sparse gradient, which is not reduced; make its layer dense (sparse=False).");
  }
  if (gradient.sizes() != buckets_[item.bucket].places()[item.place].shape) {
    throw ConfigError("rank " + std::to_string(group_->getRank()) + ": the gradient of parameter " +
                      item.parameter.name +
                      " has not the shape that the parameter had when reef::shard was called: give it other "
                      "memory before that, or call the shard's refresh().");
  }
  const Tensor place = place_of(item);
  if (!same_memory(gradient, place)) {
    if (item.sum != Sum::kNone && has_parts()) {
      place.add_(gradient);
    } else {
      place.copy_(gradient);  // what there was has been added by autograd
    }
    // Frees what autograd had made. A sharded parameter has no gradient of its own.
    gradient = has_parts() ? Tensor() : place;  // the stand-in comes at the end of the pass
  }
  if (item.sum == Sum::kNone) item.sum = Sum::kAdded;
}

// This rank has no gradient of it.
void Reducer::leave_out(Item& item) {
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  const Tensor place = place_of(item);
  if (gradient.defined() && same_memory(gradient, place)) gradient = gradient.clone();
  place.zero_();
}

// Those of a pass that is void are NaN: what has come of them counts for nothing.
void Reducer::give_gradients(const std::vector<bool>& used, bool is_void) {
  const auto make_void = [&](const Tensor& reduced) {
    if (is_void) reduced.fill_(std::numeric_limits<double>::quiet_NaN());
  };
  if (!has_parts()) {
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (!used[i]) continue;
      Item& item = items_[i];
      Tensor& gradient = item.parameter.tensor.mutable_grad();
      const Tensor place = place_of(item);
      make_void(place);
      const Tensor& before = item.sum != Sum::kNone ? item.kept : gradient;
      if (before.defined()) place.add_(before);
      gradient = place;
      if (momentum_) momentum_->note(item.parameter.tensor);
    }
    return;
  }
  clear_parts();
  for (std::size_t i = 0; i < items_.size(); ++i) give_stand_in(items_[i], used[i]);
  for (Part& part : parts_) {
    if (!used[part.piece.item]) continue;
    const ShardPiece& piece = part.piece;
    const std::int64_t begin =
        sharded() ? layout_.begin(piece.bucket, layout_.place_of(group_->getRank()).slice) : 0;
    const Tensor reduced =
        alias(buckets_[piece.bucket].own(), piece.offset - begin, part.tensor.sizes(), part.tensor.strides());
    make_void(reduced);
    Tensor& gradient = part.tensor.mutable_grad();
    if (gradient.defined()) {
      gradient.add_(reduced);
    } else {
      gradient = reduced.to(part.tensor.scalar_type());
    }
    if (momentum_) momentum_->note(part.tensor);
  }
}

// What a pass gives is a momentum, or is followed by one: neither may be added to what an earlier pass gave.
void Reducer::check_momentum() const {
  if (!momentum_) return;
  const std::string who = "rank " + std::to_string(group_->getRank()) + ": ";
  if (lines_[0].exchange->gives_momentum() && !momentum_->has_optimizer) {
    throw ConfigError(who +
                      "the warm-up of compression one_bit_adam is over, and .grad would be a momentum, for "
                      "which these parameters have no optimizer: make an optim::OneBitAdam of the shard's "
                      "parameters() before.");
  }
  const auto refuse = [&](const Item& item) {
    throw ConfigError(
        who + "parameter " + item.parameter.name +
        " has a gradient of an earlier pass, to which compression one_bit_adam cannot add: clear "
        "gradients before each pass that is reduced, and accumulate in no_sync.");
  };
  if (lent_) return;  // an update has them
  for (const Part& part : parts_) {
    const Item& item = items_[part.piece.item];
    const Tensor& gradient = part.tensor.grad();
    const bool is_old = gradient.defined() && !gradient.is_same(part.stand_in);
    if (is_old && item.before != Before::kCleared) refuse(item);
  }
  if (has_parts()) return;
  for (const Item& item : items_) {
    if ((item.sum != Sum::kNone ? item.kept : item.parameter.tensor.grad()).defined()) refuse(item);
  }
}

void Reducer::clear_as_the_module() {
  // A step beside the end of a pass is that of a DelayedUpdate, for which the pass waits.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || during_ != During::kNoPass || lent_ || !has_parts()) return;
  for (Part& part : parts_) {
    const Item& item = items_[part.piece.item];
    const Tensor& gradient = item.parameter.tensor.grad();
    if (!item.stand_in.defined() || gradient.is_same(item.stand_in)) continue;
    part.tensor.mutable_grad().reset();
    part.has_sums = false;
  }
}

// Clears the gradients of parts whose parameters' gradients the program has cleared. Gradients that are lent
// belong to the update.
void Reducer::clear_parts() {
  if (lent_) return;
  for (Part& part : parts_) {
    if (items_[part.piece.item].before == Before::kCleared) part.tensor.mutable_grad().reset();
  }
}

// Where there are parts, at the end of a pass. `added`: it has added to the parameter's gradient.
void Reducer::give_stand_in(Item& item, bool added) const {
  if (!has_parts()) return;
  item.parameter.tensor.mutable_grad() = added ? stand_in_of(item) : item.kept;
}

}  // namespace reef
