#include "shard/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "page/huge_pages.h"
#include "page/pinned.h"
#include "reef/ledger.h"
#include "shard/agreement.h"
#include "shard/gradient_heap.h"

namespace reef {

using at::Tensor;

/// After autograd has accumulated a gradient.
class Reducer::Hook final : public torch::autograd::FunctionPostHook {
 public:
  Hook(Reducer& reducer, std::size_t item) : reducer_(reducer), item_(item) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& gradients) override {
    if (!gradients.empty() && gradients[0].defined()) reducer_.ready(item_);
    return outputs;
  }

 private:
  Reducer& reducer_;
  std::size_t item_;
};

/// Before it does. Such a hook cannot be removed.
class Reducer::KeepHook final : public torch::autograd::FunctionPreHook {
 public:
  KeepHook(std::weak_ptr<Reducer*> reducer, std::size_t item) : reducer_(std::move(reducer)), item_(item) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (const auto reducer = reducer_.lock()) (*reducer)->keep(item_);
    return gradients;
  }

 private:
  std::weak_ptr<Reducer*> reducer_;
  std::size_t item_;
};

Reducer::Reducer(std::vector<ReducedParameter> parameters, ShardLayout layout, ProcessGroupPtr group,
                 int first_exchange, const ShardOptions& options)
    : watch_([reducer = std::weak_ptr<Reducer*>(self_)] {
        if (const auto alive = reducer.lock()) (*alive)->graph_begins();
      }),
      group_(std::move(group)),
      shard_name_(shard_name(first_exchange - 1)),
      layout_(std::move(layout)),
      options_(options),
      lines_{make_line(first_exchange, device_of(parameters, &ReducedParameter::tensor)),
             make_line(first_exchange + 1, device_of(parameters, &ReducedParameter::tensor))} {
  items_.resize(parameters.size());
  buckets_.reserve(layout_.buckets.size());
  for (std::size_t number = 0; number < layout_.buckets.size(); ++number) {
    const std::vector<ShardPiece>& pieces = layout_.buckets[number].items;
    for (std::size_t place = 0; place < pieces.size(); ++place) {
      Item& item = items_[pieces[place].item];
      item.parameter = std::move(parameters[pieces[place].item]);
      item.bucket = number;
      item.place = place;
      item.accumulator = torch::autograd::impl::grad_accumulator(item.parameter.tensor);
      item.hook = item.accumulator->add_post_hook(std::make_unique<Hook>(*this, pieces[place].item));
      item.accumulator->add_pre_hook(std::make_unique<KeepHook>(self_, pieces[place].item));
    }
    const auto tensor_of = [&](std::size_t item) -> const Tensor& { return items_[item].parameter.tensor; };
    const at::ScalarType dtype = tensor_of(pieces.front().item).scalar_type();
    const at::ScalarType sums = dtypes_of(dtype, options_.mixed_precision).sum;
    FlatBucket& bucket = buckets_.emplace_back(flat_bucket(layout_, number, sums, tensor_of));
    incomplete_.push_back(pieces.size());
    // Before the heap has grown: made in the first backward, it would lie among activations.
    const Tensor& first = like(bucket);
    if (!has_parts() && stays_in_heap(number, layout_.buckets.size(), first.device())) bucket.make(first);
  }
  if (options_.compression != Compression::kNone) search_.emplace(buckets_.size());
  end_step(/*used=*/false);
}

Reducer::Line Reducer::make_line(int exchange, c10::Device device) const {
  return {make_gradient_exchange(group_, exchange, layout_.ranks, options_), make_comm_lane(*group_, device)};
}

Reducer::~Reducer() {
  if (when_asked_) return;
  for (const Item& item : items_) item.accumulator->del_post_hook(item.hook);
}

// Autograd makes other accumulators, which nobody listens to, when the parameters are used next, unless
// graphs that are there keep these.
void Reducer::reduce_when_asked() {
  const std::lock_guard lock(mutex_);
  when_asked_ = true;
  for (Item& item : items_) {
    item.accumulator->del_post_hook(item.hook);
    item.accumulator.reset();
  }
}

void Reducer::set_syncing(bool syncing) {
  const std::lock_guard lock(mutex_);
  syncing_ = syncing;
}

void Reducer::set_local(bool local) {
  const std::lock_guard lock(mutex_);
  local_ = local;
}

void Reducer::lend_gradients() {
  const std::lock_guard lock(mutex_);
  take_flats_back();
  free_flats();
  lend_flats();
  lent_ = true;
}

bool Reducer::hears_of(std::size_t item) const {
  return when_asked_ || torch::autograd::impl::try_get_grad_accumulator(items_[item].parameter.tensor) ==
                            items_[item].accumulator;
}

// Where gradients of before are still there (zero_grad(set_to_none=false)), their memory is used again,
// unless the program holds on to some of it.
void Reducer::take_flats_back() {
  for (std::size_t number = 0; number < buckets_.size(); ++number)
    buckets_[number].take_back(like(buckets_[number]), [&] { return gradients_in(number); });
}

// Gradients that lie in a bucket's memory.
std::size_t Reducer::gradients_in(std::size_t number) const {
  const FlatBucket& bucket = buckets_[number];
  std::size_t known = 0;
  const auto count = [&](const Tensor& gradient) { known += same_storage(gradient, bucket.whole()) ? 1 : 0; };
  for (const FlatPlace& place : bucket.places()) {
    count(items_[place.item].parameter.tensor.grad());
    count(items_[place.item].kept);
  }
  for (const Part& part : parts_) {
    if (part.piece.bucket == number) count(part.tensor.grad());
  }
  return known;
}

void Reducer::lend_flats() {
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    FlatBucket& bucket = buckets_[number];
    if (bucket.state() != FlatBucket::State::kHere) continue;
    if (!stays_in_heap(number, buckets_.size(), like(bucket).device())) bucket.lend();
  }
}

Reducer::Line& Reducer::line_of(std::size_t bucket) {
  const c10::Device device = items_.front().parameter.tensor.device();
  return lines_[lines_[0].exchange->in_any_order(device) ? bucket % 2 : 0];
}

const Tensor& Reducer::like(const FlatBucket& bucket) const {
  return items_[bucket.places().front().item].parameter.tensor;
}

Tensor Reducer::place_of(const Item& item) {
  FlatBucket& bucket = buckets_[item.bucket];
  return bucket.places()[item.place].of(bucket.make(like(bucket)));
}

void Reducer::send(std::size_t number) {
  FlatBucket& bucket = buckets_[number];
  const Tensor flat = bucket.make(like(bucket));
  if (local_) {
    const Tensor own = options_.offload && !flat.is_cpu() ? empty_on_host(flat).copy_(flat) : flat;
    return bucket.go(own, /*stay=*/true, *line_of(number).lane, 0);
  }
  Tensor own = flat;
  if (divides_gradients()) {
    const CategoryScope gradients(Category::kGradient);
    own = on_huge_pages(at::empty({layout_.buckets[number].slice_elements}, flat.options()));
  } else if (sharded()) {
    own = lines_[0].exchange->ranks().own_slice(flat);
  }
  auto sent = std::make_shared<Pinned>(flat);
  auto reduced = std::make_shared<Pinned>(own);
  Tensor host;
  if (options_.offload && !flat.is_cpu()) host = empty_on_host(own);
  if (!divides_gradients()) bucket.hold(sent);
  bucket.hold(reduced);
  Line& line = line_of(number);
  const std::array<Tensor, 2> used{flat, own};
  const std::uint64_t ticket = line.lane->submit(
      [this, &line, number, host, sent = std::move(sent), reduced = std::move(reduced)] {
        const CategoryScope communication(Category::kCommunication);
        const GradientBucket whole{number, sent->tensor(), reduced->tensor(), buckets_[number].places()};
        if (search_) {
          search_->exchange(*line.exchange, whole);
        } else {
          line.exchange->exchange(whole);
        }
        if (host.defined()) host.copy_(reduced->tensor(), /*non_blocking=*/true);
      },
      used);
  bucket.go(host.defined() ? host : own, /*stay=*/!divides_gradients(), *line.lane, ticket);
  // While one is filled, two are sent, no more: where the link is slower than backward, divided gradients
  // would pile up whole. With one alone, link and backward wait for each other where they are about as fast.
  if (divides_gradients() && number > 1) await(buckets_[number - 2].lane(), buckets_[number - 2].ticket());
}

}  // namespace reef
