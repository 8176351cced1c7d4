#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "gather_order.h"
#include "page/huge_pages.h"
#include "page/pinned.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "shard/asked_gathers.h"
#include "shard/gather_listener.h"
#include "shard/gatherer.h"
#include "shard/measured_room.h"
#include "unrecorded.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kDividedMessage =
    "this parameter is divided among the ranks just now (reef::shard, stage parameters), and is accessed "
    "without an operator (a raw pointer, a file being written); call gather() on all ranks first";

class OnDemand final : public Gatherer, private AskedGathers::Buckets {
 public:
  OnDemand(const std::vector<Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
           int exchange, const ShardOptions& options)
      : Gatherer(parameters, std::move(layout), group, exchange, options,
                 [](FlatBucket& bucket) { bucket.drop(kDividedMessage); }),
        order_(bytes_of_buckets()),
        room_(device_, buckets_, options_.mixed_precision),
        asked_(*this, buckets_.size()) {
    observe();
    if (!by_messages(*group, device_)) return;
    static std::atomic<std::int64_t> shards{0};
    const std::int64_t number = largest({group->getRank() == 0 ? ++shards : 0}).front();
    asked_.open(group, std::to_string(number) + '/' + std::to_string(place_.copy), exchange_.copy().count);
    beginnings_ = make_comm_lane(*group, device_);
    answers_ = make_comm_lane(*group, device_);
    if (asked_.is_open())
      listener_ = std::make_unique<GatherListener>(*group, device_, [this] { return answer_elsewhere(); });
  }
  ~OnDemand() override {
    listener_.reset();
    end_together();
    if (answers_) answers_->drain();
    close();
    answers_.reset();
    beginnings_.reset();
    for (FlatBucket& bucket : buckets_) bucket.leave(kDividedMessage);
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
    step_ = std::max(step_, Step::kExpected);
  }

  void gather() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    drop_all();
    if (listener_) {
      even_out();
      drop_all();  // what has come for others meanwhile
      asked_.begin_part();
    }
    step_ = Step::kNone;
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      if (buckets_[number].state() == State::kAway) fetch(number, *lane_);
    }
    for (FlatBucket& bucket : buckets_) wait(bucket);
  }

  void begin_step(std::int64_t step) override {
    Gatherer::begin_step(step);
    const std::lock_guard lock(mutex_);
    asked_.begin_step(step);
  }

  void settle() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    for (FlatBucket& bucket : buckets_) wait(bucket);
  }

  bool answer() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    asked_.answer();
    return asked_.is_open();
  }

  void tell_failed() override {
    const std::lock_guard lock(mutex_);
    asked_.tell_failed();
  }

  void ask_at_once() override {
    const std::lock_guard lock(mutex_);
    asked_.ask_at_once();
  }

  // The failed rank has not seen the uses that the others have, so all forget the order that they have
  // learned.
  void abandon_pass() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    drop_all();
    order_ = GatherOrder(bytes_of_buckets());
    asked_.abandon_pass();
  }

 private:
  using State = FlatBucket::State;

  std::vector<std::int64_t> bytes_of_buckets() const {
    std::vector<std::int64_t> bytes;
    for (const FlatBucket& bucket : buckets_) bytes.push_back(bucket.bytes());
    return bytes;
  }

  bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept override {
    const std::lock_guard lock(mutex_);
    std::vector<std::size_t> needed;
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kWhole) {
        needed.push_back(touch.bucket);
      } else if (touch.writes) {
        begin_to_write(buckets_[touch.bucket]);
      }
    }
    if (needed.empty()) return false;
    const Unrecorded unrecorded;
    bool settled = false;
    try {
      if (step_ != Step::kNone) settle_step(call.records_gradient);
      settled = true;
      for (const std::size_t number : needed) buckets_[number].begin_use();
      bring(needed, call.in_backward        ? GatherOrder::Phase::kBackward
                    : call.records_gradient ? GatherOrder::Phase::kForward
                                            : GatherOrder::Phase::kEvaluation);
    } catch (const std::exception& error) {
      for (const std::size_t number : needed) {
        FlatBucket& bucket = buckets_[number];
        if (!settled) bucket.begin_use();
        // What is here may be stale, if that is not known.
        if (!settled || bucket.state() != State::kHere) bucket.doubt(message_of(error));
      }
    }
    return true;
  }

  void ends(const std::vector<Touch>& touches) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kOwn) continue;
      FlatBucket& bucket = buckets_[touch.bucket];
      bucket.end_use();
      if (touch.writes && bucket.state() == State::kHere) write_back(bucket);
    }
  }

  // What is to be written may be on its way.
  void begin_to_write(FlatBucket& bucket) noexcept {
    step_ = Step::kMade;
    try {
      wait(bucket);
    } catch (const std::exception&) {
      // Told when the whole is read.
    }
    if (options_.offload) lane_->drain();
  }

  // The first read after gradients were reduced. What is whole, or coming, was so before a step that some
  // rank may have made since.
  void settle_step(bool in_forward) {
    const auto heard = largest({step_ == Step::kMade ? 1 : 0, -room_.fitting_bytes()});
    if (heard[0] != 0) {
      room_.begin_step(-heard[1]);
      drop_all();
      step_ = Step::kNone;
      return;
    }
    confirm();
    if (in_forward) step_ = Step::kNone;
  }

  void bring(const std::vector<std::size_t>& needed, GatherOrder::Phase phase) {
    std::vector<GatherOrder::Held> held;
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      const FlatBucket& bucket = buckets_[number];
      held.push_back({bucket.state() != State::kAway, bucket.in_use() || asked_.is_for_others(number)});
    }
    for (const std::size_t number : needed) {
      order_.use(number, phase);
      asked_.used(number);
    }
    const GatherOrder::Moves moves = order_.plan(needed, held, most_bytes());
    for (const std::size_t number : moves.drop) drop(buckets_[number]);
    for (const std::size_t number : moves.fetch) {
      if (buckets_[number].state() == State::kAway)
        fetch(number, *lane_);  // else another rank has asked for it
    }
    for (const std::size_t number : needed) wait(buckets_[number]);
    std::int64_t gathered_bytes = 0;
    for (const FlatBucket& bucket : buckets_) {
      if (bucket.state() != State::kAway) gathered_bytes += bucket.bytes();
    }
    room_.gathered(gathered_bytes);
  }

  void fetch(std::size_t number, CommLane& lane) {
    const Tensor arriving = room_for(number);
    buckets_[number].come(arriving, lane, send(number, arriving, lane));
  }

  Tensor room_for(std::size_t number) const {
    const CategoryScope category(Category::kParameter);
    const Tensor& whole = buckets_[number].whole();
    return on_huge_pages(at::empty(whole.sizes(), whole.options()));
  }

  // By messages all gathers are begun before any is waited for, since other ranks may wait for a later one.
  std::uint64_t send(std::size_t number, const Tensor& whole, CommLane& lane) {
    asked_.begun(number);
    const auto slice = std::make_shared<Pinned>(buckets_[number].own());
    const auto place_own = [this, whole, slice] {
      own_of(whole).copy_(slice->tensor(), /*non_blocking=*/true);
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

  void await(CommLane& lane, std::uint64_t ticket) override { asked_.await(lane, ticket); }

  // A rank that has begun a gather more than others (it looks ahead) would have that paired with the next of
  // theirs, and its own next with none: nobody asks for what comes after that.
  void even_out() {
    const std::vector<std::int64_t> most = largest(asked_.begun());
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      while (asked_.begun()[number] < most[number]) take_part(number);
    }
  }

  // What this rank has begun ahead may be what no other comes to. One that is late keeps the others waiting
  // for so long at most; an error, on its way, not at all.
  void end_together() noexcept {
    constexpr std::chrono::seconds kMost{10};
    if (!asked_.is_open() || std::uncaught_exceptions() > 0) return;
    try {
      settle();
      asked_.end(kMost);
    } catch (const std::exception&) {
      // A rank is gone, so what has been begun ends with an error.
    }
  }

  // While the program waits elsewhere, where it will not use what the others ask for.
  bool answer_elsewhere() {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    return asked_.answer(/*keeps=*/false);
  }

  bool is_coming(std::size_t number) const override { return buckets_[number].state() == State::kMoving; }
  bool gather_for_others(std::size_t number) override {
    if (buckets_[number].state() != State::kAway) return false;
    fetch(number, *answers_);
    return true;
  }
  void take_part(std::size_t number) override { send(number, room_for(number), *answers_); }

  void wait(FlatBucket& bucket) {
    if (bucket.state() != State::kMoving) return;
    try {
      await(bucket.lane(), bucket.ticket());
    } catch (...) {
      bucket.lose();
      throw;
    }
    bucket.arrive();
    bucket.hold(std::make_shared<Pinned>(bucket.whole()));  // a budget would write it to a tier
  }

  void drop(FlatBucket& bucket) {
    wait(bucket);
    if (bucket.state() != State::kAway) bucket.drop(kDividedMessage);
  }

  void drop_all() {
    asked_.forget();
    for (FlatBucket& bucket : buckets_) {
      if (!bucket.in_use()) drop(bucket);
    }
  }

  std::int64_t most_bytes() const { return options_.resident_bytes.value_or(room_.bytes()); }

  mutable std::mutex mutex_;
  GatherOrder order_;
  MeasuredRoom room_;  ///< where none was given
  AskedGathers asked_;
  Step step_ = Step::kNone;               ///< since the last was settled
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
