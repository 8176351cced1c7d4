#include "shard/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "page/pager.h"
#include "reef/ledger.h"
#include "shard/agreement.h"

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
  buckets_.resize(layout_.buckets.size());
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (const ShardPiece& place : layout_.buckets[bucket].items) {
      Item& item = items_[place.item];
      item.parameter = std::move(parameters[place.item]);
      item.sizes = item.parameter.tensor.sizes();
      item.strides = item.parameter.tensor.strides();
      item.place = place;
      item.accumulator = torch::autograd::impl::grad_accumulator(item.parameter.tensor);
      item.hook = item.accumulator->add_post_hook(std::make_unique<Hook>(*this, place.item));
      item.accumulator->add_pre_hook(std::make_unique<KeepHook>(self_, place.item));
      buckets_[bucket].items.push_back(place.item);
      const Tensor& tensor = item.parameter.tensor;
      buckets_[bucket].places.push_back({place.offset, tensor.sizes().vec(), tensor.strides().vec()});
    }
    const Tensor& first = items_[buckets_[bucket].items.front()].parameter.tensor;
    buckets_[bucket].dtype = dtypes_of(first.scalar_type(), options_.mixed_precision).sum;
    buckets_[bucket].waiting = buckets_[bucket].items.size();
  }
  // Before the heap has grown: made in the first backward, they would lie among activations.
  for (std::size_t bucket = 0; bucket < buckets_.size() && !has_parts(); ++bucket) {
    if (stays(bucket)) memory_of(bucket);
  }
  end_step();
}

Reducer::Line Reducer::make_line(int exchange, c10::Device device) const {
  return {make_gradient_exchange(group_, exchange, layout_.ranks, options_), make_comm_lane(*group_, device)};
}

Reducer::~Reducer() {
  for (const Item& item : items_) item.accumulator->del_post_hook(item.hook);
}

void Reducer::set_syncing(bool syncing) {
  const std::lock_guard lock(mutex_);
  syncing_ = syncing;
}

void Reducer::lend_gradients() {
  const std::lock_guard lock(mutex_);
  hold_flats();
  free_flats();
  let_flats_go();
  lent_ = true;
}

bool Reducer::hears_of(std::size_t item) const {
  return torch::autograd::impl::try_get_grad_accumulator(items_[item].parameter.tensor) ==
         items_[item].accumulator;
}

// Where gradients of before are still there (zero_grad(set_to_none=false)), their memory is used again,
// unless the program holds on to some of it.
void Reducer::hold_flats() {
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    Bucket& bucket = buckets_[number];
    auto storage = bucket.flat.defined() ? nullptr : bucket.given.lock();
    if (storage != nullptr) {
      const Tensor& like = items_[bucket.items.front()].parameter.tensor;
      bucket.flat = all_of(c10::Storage(std::move(storage)), like, bucket.dtype);
    }
    if (bucket.flat.defined() && has_other_owners(number)) bucket.flat.reset();
  }
}

// Of the memory of a bucket's gradients, beside these and the bucket.
bool Reducer::has_other_owners(std::size_t number) {
  const Tensor& flat = buckets_[number].flat;
  std::size_t known = 1;
  const auto count = [&](const Tensor& gradient) { known += same_storage(gradient, flat) ? 1 : 0; };
  for (const std::size_t item : buckets_[number].items) {
    count(items_[item].parameter.tensor.grad());
    count(items_[item].kept);
  }
  for (const Part& part : parts_) {
    if (part.piece.bucket == number) count(part.tensor.grad());
  }
  return flat.storage().use_count() > known;
}

// In the C library's heap the holes are too small for what backward makes first, and that takes more memory
// in the end; but where its last gradients go, activations have gone.
bool Reducer::stays(std::size_t number) const {
  const bool in_heap = items_.front().parameter.tensor.is_cpu() && Pager::running(c10::kCPU) == nullptr;
  return in_heap && 4 * number + 2 <= 3 * buckets_.size();  // its middle in three quarters
}

// Once gradients are cleared, what comes next lies there: of a small GPT 17.7 bytes a parameter at the peak
// instead of 19.9.
void Reducer::let_flats_go() {
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    Bucket& bucket = buckets_[number];
    if (!bucket.flat.defined() || stays(number)) continue;
    bucket.given = bucket.flat.storage().getWeakStorageImpl();
    bucket.flat.reset();
  }
}

Reducer::Line& Reducer::line_of(std::size_t bucket) {
  const c10::Device device = items_.front().parameter.tensor.device();
  return lines_[lines_[0].exchange->in_any_order(device) ? bucket % 2 : 0];
}

const Tensor& Reducer::memory_of(std::size_t number) {
  Bucket& bucket = buckets_[number];
  if (bucket.flat.defined()) return bucket.flat;
  const CategoryScope gradients(Category::kGradient);
  const Tensor& like = items_[bucket.items.front()].parameter.tensor;
  bucket.flat =
      at::empty({layout_.elements(number)}, like.options().requires_grad(false).dtype(bucket.dtype));
  std::int64_t end = 0;  // what is padded is zero
  const auto pad = [&](std::int64_t next) { bucket.flat.narrow(0, end, next - end).zero_(); };
  for (const ShardPiece& place : layout_.buckets[number].items) {
    pad(place.offset);
    end = place.offset + place.elements;
  }
  pad(layout_.elements(number));
  return bucket.flat;
}

Tensor Reducer::place_of(const Item& item) {
  return alias(memory_of(item.place.bucket), item.place.offset, item.sizes, item.strides);
}

void Reducer::send(std::size_t number) {
  Bucket& bucket = buckets_[number];
  const Tensor flat = memory_of(number);
  const std::int64_t elements = layout_.buckets[number].slice_elements;
  if (divides_gradients()) {
    const CategoryScope gradients(Category::kGradient);
    bucket.own = at::empty({elements}, flat.options());
    bucket.flat.reset();  // the lane has the last reference
  } else {
    bucket.own = sharded() ? lines_[0].exchange->ranks().own_slice(flat) : flat;
  }
  auto sent = std::make_shared<Pinned>(flat);
  auto reduced = std::make_shared<Pinned>(bucket.own);
  Tensor host;
  if (options_.offload && !flat.is_cpu()) bucket.own = host = empty_on_host(bucket.own);
  if (!divides_gradients()) bucket.on_its_way.push_back(sent);
  bucket.on_its_way.push_back(reduced);
  Line& line = line_of(number);
  bucket.ticket =
      line.lane->submit([this, &line, number, host, sent = std::move(sent), reduced = std::move(reduced)] {
        const CategoryScope communication(Category::kCommunication);
        line.exchange->exchange({number, sent->tensor(), reduced->tensor(), buckets_[number].places});
        if (host.defined()) host.copy_(reduced->tensor(), /*non_blocking=*/true);
      });
  // While one is filled, two are sent, no more: where the link is slower than backward, divided gradients
  // would pile up whole. With one alone, link and backward wait for each other where they are about as fast.
  if (divides_gradients() && number > 1) await(*line_of(number - 2).lane, buckets_[number - 2].ticket);
}

}  // namespace reef
