#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>

#include "gather_order.h"
#include "gathered_room.h"
#include "page/budget_room.h"
#include "page/pinned.h"
#include "page/storage_access.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/gather_listener.h"
#include "shard/gather_requests.h"
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
        bytes_(sizes_of(parameters)),
        order_(bytes_),
        room_(total(bytes_)),
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
    if (!by_messages(*group, device_)) return;
    static std::atomic<std::int64_t> shards{0};
    const std::int64_t number = largest({group->getRank() == 0 ? ++shards : 0}).front();
    requests_.emplace(group, std::to_string(number) + '/' + std::to_string(copy_));
    if (!*requests_) requests_.reset();
    beginnings_ = make_comm_lane(*group, device_);
    answers_ = make_comm_lane(*group, device_);
    if (requests_)
      listener_ = std::make_unique<GatherListener>(*group, device_, [this] { return take_part(); });
  }
  ~OnDemand() override {
    listener_.reset();
    if (answers_) answers_->drain();
    close();
    answers_.reset();
    beginnings_.reset();
  }

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

  void begin_step(std::int64_t step) override {
    Gatherer::begin_step(step);
    const std::lock_guard lock(mutex_);
    by_store([&] { requests_->begin_step(step); });
    patience_ = kPatience;
    failed_ = false;
  }

  bool answer() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    by_store([&] { answer_others(); });
    return requests_.has_value();
  }

  void tell_failed() override {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    by_store([&] {
      requests_->tell_failed();
      ask();
    });
  }

  // The failed rank has not seen the uses that the others have, so all forget the order that they have
  // learned.
  void abandon_pass() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    drop_all();
    order_ = GatherOrder(bytes_);
    failed_ = false;
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
    CommLane* lane = nullptr;      ///< kComing: on which it does
    std::uint64_t ticket = 0;      ///< of that
    bool asked_for = false;        ///< by another rank, and not used here since
    std::unique_ptr<Pinned> kept;  ///< kWhole: a budget would write it to a tier
    std::int64_t gathers = 0;      ///< that have begun, ever
    std::int64_t asked = 0;        ///< of these, the last that another rank was asked for
  };
  using milliseconds = std::chrono::milliseconds;
  static constexpr milliseconds kPatience{1000};  // before the others are asked for a gather
  static constexpr milliseconds kLook{100};       // at what they ask, while this rank waits
  static constexpr milliseconds kLookAgain{2};    // once it has been so in this step
  static constexpr std::size_t kAskedForAtOnce = 2;

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
    for (const Bucket& bucket : buckets_) {
      held.push_back({bucket.state != State::kDivided, bucket.users > 0 || bucket.asked_for});
    }
    for (const std::size_t number : needed) {
      order_.use(number, phase);
      buckets_[number].asked_for = false;
    }
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

  void fetch(std::size_t number) { fetch(number, *lane_); }
  void fetch(std::size_t number, CommLane& lane) {
    Bucket& bucket = buckets_[number];
    bucket.coming = room_for(number);
    bucket.state = State::kComing;
    bucket.lane = &lane;
    bucket.ticket = send(number, bucket.coming, lane);
  }

  Tensor room_for(std::size_t number) const {
    const CategoryScope category(Category::kParameter);
    const Tensor& whole = buckets_[number].whole;
    return at::empty(whole.sizes(), whole.options());
  }

  // By messages all gathers are begun before any is waited for, since other ranks may wait for a later one.
  std::uint64_t send(std::size_t number, const Tensor& whole, CommLane& lane) {
    Bucket& bucket = buckets_[number];
    ++bucket.gathers;
    const auto slice = std::make_shared<Pinned>(bucket.slice);
    const auto place_own = [this, whole, slice] {
      exchange_.own_slice(whole).copy_(slice->tensor(), /*non_blocking=*/true);
    };
    if (!beginnings_) {
      return lane.submit([this, whole, place_own] {
        place_own();
        exchange_.all_gather(whole);
      });
    }
    const auto end = std::make_shared<std::function<void()>>();
    const std::uint64_t begun = beginnings_->submit([this, number, whole, place_own, end] {
      place_own();
      *end = exchange_.begin_all_gather(whole, static_cast<int>(number));
    });
    return lane.submit([this, begun, end] {
      beginnings_->wait(begun);
      (*end)();
      *end = nullptr;
    });
  }

  // Where ranks use parameters in one order, none waits so long that it asks, unless another is slow.
  void await(CommLane& lane, std::uint64_t ticket) override {
    for (milliseconds waited{0}; requests_ && !lane.wait_for(ticket, std::min(patience_, kLook));
         waited += std::min(patience_, kLook)) {
      by_store([&] {
        answer_others();
        if (waited < patience_ && !requests_->has_failed()) return;
        patience_ = kLookAgain;
        ask();
      });
    }
    lane.wait(ticket);
  }

  // If the store is gone, so is its rank, of which those who wait for a message are told.
  template <class What>
  void by_store(const What& what) {
    if (!requests_) return;
    try {
      what();
    } catch (const std::exception&) {
      requests_.reset();
    }
  }

  void ask() {
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      Bucket& bucket = buckets_[number];
      if (bucket.state != State::kComing || bucket.asked == bucket.gathers) continue;
      requests_->make({number, bucket.gathers});
      bucket.asked = bucket.gathers;
    }
  }

  // Beside what this rank gathers itself, which may be what the others have not come to. A rank that is slow
  // will use what it is asked for, and keeps that; one whose pass has failed will not, nor one that waits
  // elsewhere.
  bool answer_others(bool keeps = true) {
    const auto asked = requests_->take();
    for (const auto& [number, count] : asked) {
      Bucket& bucket = buckets_[number];
      if (bucket.gathers < count && bucket.state == State::kDivided && keeps && !failed_) {
        fetch(number, *answers_);
        keep_asked_for(number);
      }
      while (bucket.gathers < count) send(number, room_for(number), *answers_);
    }
    return !asked.empty();
  }

  // While the program waits elsewhere.
  bool take_part() {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    bool asked = false;
    by_store([&] { asked = answer_others(/*keeps=*/false); });
    return asked;
  }

  // Of what it does not come to, the last: what a rank that waits needs now, and has on its way.
  void keep_asked_for(std::size_t number) {
    buckets_[number].asked_for = true;
    asked_for_.push_back(number);
    if (asked_for_.size() <= kAskedForAtOnce) return;
    buckets_[asked_for_.front()].asked_for = false;
    asked_for_.pop_front();
  }

  void wait(Bucket& bucket) {
    if (bucket.state != State::kComing) return;
    try {
      await(*bucket.lane, bucket.ticket);
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
      bucket.asked_for = false;
      if (bucket.users == 0) drop(bucket);
    }
  }

  std::int64_t most_bytes() const { return options_.resident_bytes.value_or(room_.bytes()); }

  mutable std::mutex mutex_;
  std::vector<std::int64_t> bytes_;  ///< of each bucket, whole
  GatherOrder order_;
  GatheredRoom room_;  ///< where none was given
  BudgetRoom budget_room_;
  std::optional<GatherRequests> requests_;  ///< if ranks can gather in any order
  milliseconds patience_ = kPatience;       ///< of this step
  bool failed_ = false;                     ///< this rank's pass, or one in no_sync of this step
  std::deque<std::size_t> asked_for_;       ///< the last buckets that this rank was
  std::int64_t largest_sums_bytes_ = 0;     ///< of a bucket's gradients
  std::int64_t most_gathered_bytes_ = 0;    ///< at any time since budget_room_ began
  std::vector<Bucket> buckets_;
  bool expecting_ = false;
  bool written_ = false;                  ///< a part of this rank's, since the last step was settled
  std::unique_ptr<CommLane> beginnings_;  ///< of gathers, by messages
  std::unique_ptr<CommLane> answers_;     ///< of gathers that other ranks have asked for
  std::unique_ptr<GatherListener> listener_;
};

}  // namespace

std::unique_ptr<Gatherer> gather_on_demand(const std::vector<Tensor>& parameters, ShardLayout layout,
                                           const ProcessGroupPtr& group, int exchange,
                                           const ShardOptions& options) {
  return std::make_unique<OnDemand>(parameters, std::move(layout), group, exchange, options);
}

}  // namespace reef
