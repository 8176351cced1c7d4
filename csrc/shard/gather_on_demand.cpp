#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>

#include "gather_order.h"
#include "gathered_room.h"
#include "page/budget_room.h"
#include "page/pinned.h"
#include "page/storage_access.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/gatherer.h"
#include "unrecorded.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kDividedMessage =
    "this parameter is divided among the ranks just now (reef::shard, stage parameters), and is accessed "
    "without an operator (a raw pointer, a file being written); call gather() on all ranks first";

class OnDemand final : public Gatherer {
 public:
  OnDemand(const std::vector<Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
           int exchange, const ShardOptions& options)
      : Gatherer(parameters, std::move(layout), group, exchange, options),
        order_(sizes_of(parameters)),
        room_(total(sizes_of(parameters))),
        budget_room_(device_of(parameters)),
        buckets_(layout_.buckets.size()) {
    std::vector<Tensor> wholes;
    std::vector<Tensor> slices;
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      Bucket& bucket = buckets_[number];
      const Flat flat = flatten(parameters, number);
      bucket.whole = flat.whole;
      bucket.slice = kept(exchange_.own_slice(flat.exact));
      keep_parts(parameters, number, bucket.slice);
      bucket.state = State::kWhole;
      drop(bucket);
      const auto sum_bytes = static_cast<std::int64_t>(c10::elementSize(dtypes(parameters, number).sum));
      largest_sums_bytes_ = std::max(largest_sums_bytes_, layout_.elements(number) * sum_bytes);
      wholes.push_back(bucket.whole);
      slices.push_back(bucket.slice);
    }
    observe(wholes, slices);
  }
  ~OnDemand() override { close(); }

  std::int64_t resident_bytes() const override {
    const std::lock_guard lock(mutex_);
    return most_bytes();
  }

  void expect_step() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    drop_all();
    order_.end_step();
    expecting_ = true;
  }

  void gather() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    drop_all();
    expecting_ = written_ = false;
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      if (buckets_[number].state == State::kDivided) fetch(number);
    }
    for (Bucket& bucket : buckets_) wait(bucket);
  }

 private:
  enum class State : std::uint8_t {
    kDivided,  ///< the slice; whoever accesses the whole is refused
    kComing,   ///< and the whole, in memory of its own
    kWhole,    ///< and the whole
  };
  struct Bucket {
    Tensor whole;  ///< its memory is there in kWhole
    Tensor slice;
    State state = State::kDivided;
    int users = 0;  ///< running operators
    Tensor coming;
    std::uint64_t ticket = 0;
    std::unique_ptr<Pinned> sent;  ///< kComing: the slice
    std::unique_ptr<Pinned> kept;  ///< kWhole: a budget would write it to a tier
  };

  std::vector<std::int64_t> sizes_of(const std::vector<Tensor>& parameters) const {
    std::vector<std::int64_t> bytes;
    for (std::size_t bucket = 0; bucket < layout_.buckets.size(); ++bucket) {
      const auto element_bytes =
          static_cast<std::int64_t>(c10::elementSize(dtypes(parameters, bucket).parameter));
      bytes.push_back(layout_.elements(bucket) * element_bytes);
    }
    return bytes;
  }

  static std::int64_t total(const std::vector<std::int64_t>& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  }

  bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept override {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> needed;
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kOwn) {
        if (touch.writes) {
          expecting_ = written_ = true;
          await(buckets_[touch.bucket]);
        }
        continue;
      }
      needed.push_back(touch.bucket);
    }
    if (needed.empty()) return false;
    const Unrecorded unrecorded;
    bool settled = false;
    try {
      if (expecting_) settle_step(call.records_gradient);
      settled = true;
      for (const std::size_t number : needed) ++buckets_[number].users;
      bring(needed, call.in_backward        ? GatherOrder::Phase::kBackward
                    : call.records_gradient ? GatherOrder::Phase::kForward
                                            : GatherOrder::Phase::kEvaluation);
    } catch (const std::exception& error) {
      for (const std::size_t number : needed) {
        Bucket& bucket = buckets_[number];
        if (!settled) ++bucket.users;
        // What is whole may be stale, if that is not known.
        if (!settled || bucket.state != State::kWhole)
          refuse_access(*bucket.whole.storage().unsafeGetStorageImpl(), message_of(error));
      }
    }
    return true;
  }

  void ends(const std::vector<Touch>& touches) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kOwn) continue;
      Bucket& bucket = buckets_[touch.bucket];
      --bucket.users;
      if (touch.writes && bucket.state == State::kWhole)
        write_back(exchange_.own_slice(bucket.whole), bucket.slice);
    }
  }

  // The first read after gradients were reduced. What is whole, or coming, was so before a step that some
  // rank may have made since.
  void settle_step(bool in_forward) {
    constexpr std::int64_t kNoBudget = std::numeric_limits<std::int64_t>::max();
    std::int64_t fitting_bytes = budget_room_.left_bytes().value_or(kNoBudget);
    // Whether a bucket of gradients is still on its way when the next is made differs from step to step.
    if (fitting_bytes >= 0 && fitting_bytes < kNoBudget)
      fitting_bytes = most_gathered_bytes_ + std::max<std::int64_t>(fitting_bytes - largest_sums_bytes_, 0);
    const auto heard = largest({written_ ? 1 : 0, -fitting_bytes});
    if (heard[0] != 0) {
      -heard[1] == kNoBudget ? room_.close() : room_.after_step(-heard[1]);
      budget_room_.begin();
      most_gathered_bytes_ = 0;
      drop_all();
      expecting_ = written_ = false;
    } else if (in_forward) {
      expecting_ = false;
    }
  }

  void bring(const std::vector<std::size_t>& needed, GatherOrder::Phase phase) {
    std::vector<GatherOrder::Held> held;
    for (const Bucket& bucket : buckets_) held.push_back({bucket.state != State::kDivided, bucket.users > 0});
    for (const std::size_t number : needed) order_.use(number, phase);
    const GatherOrder::Moves moves = order_.plan(needed, held, most_bytes());
    for (const std::size_t number : moves.drop) drop(buckets_[number]);
    for (const std::size_t number : moves.fetch) fetch(number);
    for (const std::size_t number : needed) wait(buckets_[number]);
    std::int64_t gathered_bytes = 0;
    for (const Bucket& bucket : buckets_) {
      if (bucket.state != State::kDivided) gathered_bytes += static_cast<std::int64_t>(bucket.whole.nbytes());
    }
    most_gathered_bytes_ = std::max(most_gathered_bytes_, gathered_bytes);
  }

  void fetch(std::size_t number) {
    Bucket& bucket = buckets_[number];
    {
      const CategoryScope category(Category::kParameter);
      bucket.coming = at::empty(bucket.whole.sizes(), bucket.whole.options());
    }
    bucket.sent = std::make_unique<Pinned>(bucket.slice);
    bucket.state = State::kComing;
    bucket.ticket = lane_->submit([this, number, whole = bucket.coming, slice = bucket.slice] {
      exchange_.own_slice(whole).copy_(slice, /*non_blocking=*/true);
      exchange_.all_gather(whole, static_cast<int>(number));
    });
  }

  void wait(Bucket& bucket) {
    if (bucket.state != State::kComing) return;
    try {
      lane_->wait(bucket.ticket);
    } catch (...) {
      forget(bucket);
      throw;
    }
    c10::StorageImpl& storage = *bucket.whole.storage().unsafeGetStorageImpl();
    allow_access(storage);
    storage.set_data_ptr_noswap(
        bucket.coming.storage().unsafeGetStorageImpl()->set_data_ptr({nullptr, storage.device()}));
    forget(bucket);
    bucket.state = State::kWhole;
    bucket.kept = std::make_unique<Pinned>(bucket.whole);
  }

  // An operator is about to write the slice, which may be on its way.
  void await(Bucket& bucket) noexcept {
    try {
      wait(bucket);
    } catch (const std::exception&) {
      // Told when the whole is read.
    }
    if (options_.offload) lane_->drain();
  }

  static void forget(Bucket& bucket) {
    bucket.coming.reset();
    bucket.sent.reset();
    bucket.state = State::kDivided;
  }

  void drop(Bucket& bucket) {
    wait(bucket);
    if (bucket.state != State::kWhole) return;
    bucket.kept.reset();
    c10::StorageImpl& storage = *bucket.whole.storage().unsafeGetStorageImpl();
    refuse_access(storage, kDividedMessage);
    storage.set_data_ptr_noswap({nullptr, storage.device()});
    bucket.state = State::kDivided;
  }

  void drop_all() {
    for (Bucket& bucket : buckets_) {
      if (bucket.users == 0) drop(bucket);
    }
  }

  std::int64_t most_bytes() const { return options_.resident_bytes.value_or(room_.bytes()); }

  mutable std::mutex mutex_;
  GatherOrder order_;
  GatheredRoom room_;  ///< where none was given
  BudgetRoom budget_room_;
  std::int64_t largest_sums_bytes_ = 0;   ///< of a bucket's gradients
  std::int64_t most_gathered_bytes_ = 0;  ///< at any time since budget_room_ began
  std::vector<Bucket> buckets_;
  bool expecting_ = false;
  bool written_ = false;  ///< a part of this rank's, since the last step was settled
};

}  // namespace

std::unique_ptr<Gatherer> gather_on_demand(const std::vector<Tensor>& parameters, ShardLayout layout,
                                           const ProcessGroupPtr& group, int exchange,
                                           const ShardOptions& options) {
  return std::make_unique<OnDemand>(parameters, std::move(layout), group, exchange, options);
}

}  // namespace reef
