// A pass of backward: how it begins, ends, and is abandoned.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "autograd/outermost_graph.h"
#include "reef/error.h"
#include "shard/reducer.h"

namespace reef {

using at::Tensor;

/// A pass of backward, which ends with the outermost of the graphs that run within each other. If it ends
/// early, by an error, it is abandoned.
class Reducer::Pass {
 public:
  explicit Pass(std::weak_ptr<Reducer*> reducer) : reducer_(std::move(reducer)) {}
  ~Pass() {
    if (over_) return;
    if (const auto reducer = reducer_.lock()) (*reducer)->abandon();
  }
  void finish() {
    over_ = true;
    if (const auto reducer = reducer_.lock()) (*reducer)->finish();
  }

 private:
  std::weak_ptr<Reducer*> reducer_;
  bool over_ = false;
};

void Reducer::ready(std::size_t number) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  Item& item = items_[number];
  if (!item.parameter.tensor.grad().defined()) {
    throw ConfigError("rank " + std::to_string(group_->getRank()) + ": the gradient of parameter " +
                      item.parameter.name +
                      " was taken before it could be reduced; what steps in backward (GradientRelease) knows "
                      "nothing of the other ranks: step when backward is over.");
  }
  begin_pass();
  if (item.place.bucket < next_bucket_) {
    throw ConfigError(
        "rank " + std::to_string(group_->getRank()) + ": parameter " + item.parameter.name +
        " has got another gradient after its gradients were sent, in one pass of backward: it is used "
        "in several graphs that run within each other; checkpoint with use_reentrant=False.");
  }
  take(item);
  // Another graph of the pass may add to it once more.
  if (!syncing_ || item.ready || runs_within_another_graph()) return;
  item.ready = true;
  --buckets_[item.place.bucket].waiting;
  send_whole_buckets();
}

void Reducer::begin_pass() {
  if (in_pass_) return;
  in_pass_ = true;
  at_end_of_outermost_graph([pass = std::make_shared<Pass>(self_)] { pass->finish(); });
  if (lent_) return;
  hold_flats();
  free_flats();
}

void Reducer::send_whole_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].waiting == 0) send(next_bucket_++);
}

// At the end of backward, on the thread that ran it.
void Reducer::finish() {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (has_parts()) {
    for (Item& item : items_) see(item);
  }
  if (!syncing_) {
    clear_parts();
    for (Item& item : items_) give_stand_in(item, item.filled);
    for (Item& item : items_) item.seen = item.cleared = false;
    in_pass_ = false;
    return;
  }
  try {
    send_the_rest();
    const std::vector<bool> used = used_anywhere(/*abandons=*/false);
    if (used.back()) {
      const int rank = who_abandons(false);
      end_step();
      throw PassAbandoned("rank " + std::to_string(group_->getRank()) + ": backward has failed on rank " +
                              std::to_string(rank) +
                              ", whose error says why, so this pass is abandoned on every rank: clear the "
                              "gradients, and go on with the next batch.",
                          rank);
    }
    giving_();
    lent_ = false;
    give_gradients(used);
    end_step();
    reduced_();
  } catch (...) {
    give_up();
    throw;
  }
  end_pass();
}

void Reducer::end_step() {
  ++step_;
  for (Line& line : lines_) line.exchange.begin_step(step_);
}

void Reducer::send_the_rest() {
  for (; next_bucket_ < buckets_.size(); ++next_bucket_) {
    for (const std::size_t number : buckets_[next_bucket_].items) {
      if (!items_[number].filled) leave_out(items_[number]);
    }
    send(next_bucket_);
  }
}

// Gives, for each of these, the largest that a rank has, once all buckets have arrived. All ranks call it
// alike.
Tensor Reducer::largest(const Tensor& own) {
  const Tensor values = own.to(items_.front().parameter.tensor.device());
  Line& line = line_of(buckets_.size());
  line.lane->submit([&line, values] { line.exchange.largest(values); });
  for (const Line& each : lines_) {
    each.lane->wait_all();
    if (options_.offload) each.lane->drain();  // the host reads them
  }
  return values.cpu();
}

// Gives the lowest rank that abandons the pass.
int Reducer::who_abandons(bool abandons) {
  const int ranks = group_->getSize();
  const Tensor told = largest(at::full({1}, abandons ? ranks - group_->getRank() : 0, at::kLong));
  return ranks - static_cast<int>(told.item<std::int64_t>());
}

// Gives, for each item, whether a rank has a gradient of it, and last whether a rank abandons the pass.
std::vector<bool> Reducer::used_anywhere(bool abandons) {
  Tensor flags = at::zeros({static_cast<std::int64_t>(items_.size()) + 1}, at::kByte);
  auto* const own = flags.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < items_.size(); ++i) own[i] = items_[i].filled ? 1 : 0;
  own[items_.size()] = abandons ? 1 : 0;
  flags = largest(flags);
  const auto* const all = flags.const_data_ptr<std::uint8_t>();
  return std::vector<bool>(all, all + items_.size() + 1);
}

void Reducer::end_pass() noexcept {
  in_pass_ = false;
  next_bucket_ = 0;
  for (Item& item : items_) {
    item.filled = item.ready = item.seen = item.cleared = false;
    item.kept.reset();
  }
  for (Bucket& bucket : buckets_) {
    bucket.waiting = bucket.items.size();
    bucket.own.reset();
    bucket.on_its_way.clear();
  }
  let_flats_go();
}

// An error has ended this rank's pass, and is on its way to the program. The others wait for its gradients:
// they get some, and are told that these are worth nothing. Where parameters are divided they wait for those,
// too, which this rank's operators would have gathered: nobody can be told before the group's timeout.
void Reducer::abandon() noexcept {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  if (!in_pass_) return;
  if (syncing_ && options_.stage != Stage::kParameters) {
    try {
      send_the_rest();
      used_anywhere(/*abandons=*/true);
      who_abandons(true);
      end_step();
    } catch (...) {  // the next pass finds the same, if the others are gone
    }
  }
  give_up();
}

// Gradients are what they were. Memory that may be on its way is left to the lane.
void Reducer::give_up() noexcept {
  for (std::size_t bucket = 0; bucket < next_bucket_; ++bucket) buckets_[bucket].flat.reset();
  for (Item& item : items_) {
    if (item.filled || item.seen || item.kept.defined()) item.parameter.tensor.mutable_grad() = item.kept;
  }
  end_pass();
}

}  // namespace reef
