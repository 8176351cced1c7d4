#include <algorithm>
#include <atomic>
#include <mutex>

#include "page/pinned.h"
#include "reef/error.h"
#include "shard/gatherer.h"
#include "unrecorded.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kStaleMessage =
    "this parameter may be out of date: a step may have been made since it was gathered (reef::shard), and "
    "it is accessed without an operator (a raw pointer, a file being written); call gather() on all ranks "
    "first";

constexpr const char* kEndedMessage =
    "this parameter may be out of date: a step may have been made since it was gathered, and what knew of it "
    "(reef::Shard) is gone; keep it, or call gather() on all ranks before it goes";

class AfterSteps final : public Gatherer {
 public:
  AfterSteps(const std::vector<Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
             int exchange, const ShardOptions& options)
      : Gatherer(parameters, std::move(layout), group, exchange, options, [](FlatBucket&) {}) {
    observe();
  }
  ~AfterSteps() override {
    close();
    for (FlatBucket& bucket : buckets_) bucket.leave(kEndedMessage);
  }

  void expect_step() override {
    const std::lock_guard lock(mutex_);
    expect(Step::kExpected);
  }

  bool can_hold() const override { return options_.offload; }
  std::function<void()> hold() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    if (held_) start();
    held_ = true;
    confirm();
    return [this] {
      lane_->wait_all();
      lane_->drain();
    };
  }
  void release() override {
    const std::lock_guard lock(mutex_);
    if (!held_) return;
    held_ = false;
    expect(Step::kExpected);
  }

  void gather() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    start();
    for (FlatBucket& bucket : buckets_) wait(bucket);
  }

 private:
  using State = FlatBucket::State;

  // Optimizers may write through aliases of a part, so a write is known by its memory.
  bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept override {
    bool wholes = false;
    for (const Touch& touch : touches) {
      wholes |= touch.what == Touched::kWhole;
      if (touch.what == Touched::kOwn && touch.writes) begin_to_write(buckets_[touch.bucket]);
    }
    if (!wholes) return false;
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    ++users_;
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kWhole) bring(touch, call.records_gradient);
    }
    return true;
  }

  void ends(const std::vector<Touch>& touches) noexcept override {
    const std::lock_guard lock(mutex_);
    for (const Touch& touch : touches) {
      const FlatBucket& bucket = buckets_[touch.bucket];
      if (touch.writes && touch.what == Touched::kWhole && bucket.state() == State::kHere) write_back(bucket);
    }
    --users_;
    if (step_ != Step::kNone) expect(Step::kExpected);
  }

  // What is written may be on its way to the other ranks.
  void begin_to_write(FlatBucket& bucket) noexcept {
    if (step_ == Step::kMade && !coming_) return;
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    try {
      wait(bucket);
    } catch (const std::exception&) {
      // Told when a parameter is read.
    }
    if (options_.offload) lane_->drain();
    expect(Step::kMade);
  }

  // A step may have been made. Running operators keep what they were given; while parts are written beside
  // the program (held), parameters stay what they were.
  void expect(Step step) noexcept {
    step_ = std::max(step_.load(), step);
    if (users_ > 0 || held_) return;
    for (FlatBucket& bucket : buckets_) {
      if (bucket.state() == State::kHere) bucket.doubt(kStaleMessage);
    }
  }

  void bring(const Touch& touch, bool in_forward) noexcept {
    try {
      if (step_ != Step::kNone && !held_) settle(in_forward);
      wait(buckets_[touch.bucket]);
      if (touch.writes && options_.offload) lane_->drain();
    } catch (const std::exception& error) {
      for (FlatBucket& each : buckets_) each.doubt(message_of(error));
    }
  }

  // Asks whether a step has been made, on any rank.
  void settle(bool in_forward) {
    const bool made = step_ == Step::kMade;
    if (divided_ ? anywhere(made) : made) return start();
    confirm();
    if (in_forward) step_ = Step::kNone;  // from here on ranks may read different parameters
  }

  void start() {
    for (FlatBucket& bucket : buckets_) wait(bucket);
    step_ = Step::kNone;
    coming_ = true;
    // Buckets are in the order of backward; forward reads them in the other.
    for (std::size_t number = buckets_.size(); number-- > 0;) {
      FlatBucket& bucket = buckets_[number];
      bucket.doubt(kStaleMessage);
      bucket.hold(std::make_shared<Pinned>(bucket.whole()));
      bucket.hold(std::make_shared<Pinned>(bucket.own()));
      bucket.come(*lane_, lane_->submit([this, whole = unchecked(bucket.whole()), own = bucket.own()] {
        own_of(whole).copy_(own, /*non_blocking=*/true);
        if (divided_) exchange_.all_gather(whole);
      }));
    }
  }

  void wait(FlatBucket& bucket) {
    if (bucket.state() != State::kMoving) return;
    lane_->wait(bucket.ticket());
    bucket.arrive();
    coming_ = std::any_of(buckets_.begin(), buckets_.end(),
                          [](const FlatBucket& each) { return each.state() == State::kMoving; });
  }

  std::mutex mutex_;
  int users_ = 0;                        ///< running operators that touch parameters
  std::atomic<Step> step_{Step::kNone};  ///< since the last gather
  std::atomic<bool> coming_{false};      ///< some bucket is
  bool held_ = false;
};

}  // namespace

std::unique_ptr<Gatherer> gather_after_steps(const std::vector<Tensor>& parameters, ShardLayout layout,
                                             const ProcessGroupPtr& group, int exchange,
                                             const ShardOptions& options) {
  return std::make_unique<AfterSteps>(parameters, std::move(layout), group, exchange, options);
}

}  // namespace reef
