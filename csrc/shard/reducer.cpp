#include "shard/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "page/pager.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/stand_in.h"

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

/// A pass of backward. If it ends early, by an error, what it has begun is given up.
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

Reducer::Reducer(std::vector<ReducedParameter> parameters, ShardLayout layout, ProcessGroupPtr group,
                 int first_exchange, const ShardOptions& options)
    : group_(std::move(group)),
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
      item.place = place;
      item.accumulator = torch::autograd::impl::grad_accumulator(item.parameter.tensor);
      item.hook = item.accumulator->add_post_hook(std::make_unique<Hook>(*this, place.item));
      item.accumulator->add_pre_hook(std::make_unique<KeepHook>(self_, place.item));
      buckets_[bucket].items.push_back(place.item);
    }
    buckets_[bucket].waiting = buckets_[bucket].items.size();
  }
  // Before the heap has grown: made in the first backward, they would lie among activations.
  for (std::size_t bucket = 0; bucket < buckets_.size() && !has_parts(); ++bucket) {
    if (stays(bucket)) memory_of(bucket);
  }
  end_step();
}

Reducer::Line Reducer::make_line(int exchange, c10::Device device) const {
  return {{group_, exchange, layout_.ranks, options_.sum_order}, make_comm_lane(*group_, device)};
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
  take(item);
  if (!syncing_ || item.ready) return;
  item.ready = true;
  --buckets_[item.place.bucket].waiting;
  send_whole_buckets();
}

void Reducer::begin_pass() {
  if (in_pass_) return;
  in_pass_ = true;
  auto pass = std::make_shared<Pass>(self_);
  torch::autograd::Engine::get_default_engine().queue_callback([pass] { pass->finish(); });
  if (lent_) return;
  hold_flats();
  free_flats();
}

// Where gradients of before are still there (zero_grad(set_to_none=false)), their memory is used again.
void Reducer::hold_flats() {
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    Bucket& bucket = buckets_[number];
    if (bucket.flat.defined()) continue;
    if (auto storage = bucket.given.lock()) {
      const Tensor& like = items_[bucket.items.front()].parameter.tensor;
      bucket.flat = all_of(c10::Storage(std::move(storage)), like, dtype_of(number));
    }
  }
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

at::ScalarType Reducer::dtype_of(std::size_t bucket) const {
  const Tensor& first = items_[buckets_[bucket].items.front()].parameter.tensor;
  return dtypes_of(first.scalar_type(), options_.mixed_precision).sum;
}

// Gradients of parts that have been kept since the last step may lie where sums are about to be.
void Reducer::free_flats() {
  if (divides_gradients()) return;
  for (KeptPart& part : parts_) {
    Tensor& gradient = part.tensor.mutable_grad();
    if (same_storage(gradient, buckets_[part.piece.bucket].flat)) gradient = gradient.clone();
  }
}

Reducer::Line& Reducer::line_of(std::size_t bucket) {
  const c10::Device device = items_.front().parameter.tensor.device();
  return lines_[lines_[0].exchange.in_any_order(device) ? bucket % 2 : 0];
}

const Tensor& Reducer::memory_of(std::size_t number) {
  Bucket& bucket = buckets_[number];
  if (bucket.flat.defined()) return bucket.flat;
  const CategoryScope gradients(Category::kGradient);
  const Tensor& like = items_[bucket.items.front()].parameter.tensor;
  bucket.flat =
      at::empty({layout_.elements(number)}, like.options().requires_grad(false).dtype(dtype_of(number)));
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
  const Tensor& parameter = item.parameter.tensor;
  return alias(memory_of(item.place.bucket), item.place.offset, parameter.sizes(), parameter.strides());
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

void Reducer::send_whole_buckets() {
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].waiting == 0) send(next_bucket_++);
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
    bucket.own = sharded() ? lines_[0].exchange.own_slice(flat) : flat;
  }
  auto sent = std::make_shared<Pinned>(flat);
  auto reduced = std::make_shared<Pinned>(bucket.own);
  Tensor host;
  if (options_.offload && !flat.is_cpu()) bucket.own = host = empty_on_host(bucket.own);
  if (!divides_gradients()) bucket.on_its_way.push_back(sent);
  bucket.on_its_way.push_back(reduced);
  Line& line = line_of(number);
  bucket.ticket =
      line.lane->submit([this, &line, host, sent = std::move(sent), reduced = std::move(reduced)] {
        const CategoryScope communication(Category::kCommunication);
        const Tensor& whole = sent->tensor();
        if (sharded()) {
          line.exchange.reduce_scatter(whole, reduced->tensor(), options_.reduction);
        } else {
          line.exchange.all_reduce(whole, options_.reduction);
        }
        if (host.defined()) host.copy_(reduced->tensor(), /*non_blocking=*/true);
      });
  // While one is filled, two are sent, no more: where the link is slower than backward, divided gradients
  // would pile up whole. With one alone, link and backward wait for each other where they are about as fast.
  if (divides_gradients() && number > 1) line_of(number - 2).lane->wait(buckets_[number - 2].ticket);
}

// This rank has no gradient of it.
void Reducer::leave_out(Item& item) {
  Tensor& gradient = item.parameter.tensor.mutable_grad();
  const Tensor place = place_of(item);
  if (gradient.defined() && same_memory(gradient, place)) gradient = gradient.clone();
  place.zero_();
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
    for (; next_bucket_ < buckets_.size(); ++next_bucket_) {
      for (const std::size_t number : buckets_[next_bucket_].items) {
        if (!items_[number].filled) leave_out(items_[number]);
      }
      send(next_bucket_);
    }
    const std::vector<bool> used = used_anywhere();
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

// One small message, beside the last bucket.
std::vector<bool> Reducer::used_anywhere() {
  Tensor flags = at::zeros({static_cast<std::int64_t>(items_.size())}, at::kByte);
  auto* const own = flags.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < items_.size(); ++i) own[i] = items_[i].filled ? 1 : 0;
  flags = flags.to(items_.front().parameter.tensor.device());
  Line& beside = line_of(buckets_.size());
  beside.lane->submit([&beside, flags] { beside.exchange.largest(flags); });
  for (const Line& line : lines_) {
    line.lane->wait_all();
    if (options_.offload) line.lane->drain();  // the host reads them
  }
  flags = flags.cpu();
  const auto* const all = flags.const_data_ptr<std::uint8_t>();
  return std::vector<bool>(all, all + items_.size());
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

void Reducer::abandon() noexcept {
  const std::lock_guard lock(mutex_);
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
