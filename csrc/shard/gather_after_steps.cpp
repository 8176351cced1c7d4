#include <algorithm>
#include <atomic>
#include <mutex>

#include "page/pinned.h"
#include "page/storage_access.h"
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
      : Gatherer(parameters, std::move(layout), group, exchange, options),
        divided_(options.stage != Stage::kReplicate),
        buckets_(layout_.buckets.size()) {
    std::vector<Tensor> wholes, owns;
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      Bucket& bucket = buckets_[number];
      const Flat flat = flatten(parameters, number);
      bucket.whole = flat.whole;
      bucket.own = kept(own_of(flat.exact));
      if (divided_) {
        keep_parts(parameters, number, bucket.own);
      } else {
        keep_whole(parameters, number, bucket.own);
      }
      wholes.push_back(bucket.whole);
      owns.push_back(bucket.own);
    }
    observe(wholes, owns);
  }
  ~AfterSteps() override {
    close();
    for (Bucket& bucket : buckets_) {
      if (unmark_stale(bucket.storage())) refuse_access(bucket.storage(), kEndedMessage);
    }
  }

  void expect_step() override {
    const std::lock_guard lock(mutex_);
    expect();
  }

  bool can_hold() const override { return options_.offload; }
  std::function<void()> hold() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    if (held_) start();
    held_ = true;
    make_current();
    return [this] {
      lane_->wait_all();
      lane_->drain();
    };
  }
  void release() override {
    const std::lock_guard lock(mutex_);
    if (!held_) return;
    held_ = false;
    expect();
  }

  void gather() override {
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    start();
    for (Bucket& bucket : buckets_) wait(bucket);
  }

 private:
  enum class State : std::uint8_t {
    kCurrent,  ///< the whole is what all ranks have made of their parts
    kStale,    ///< it may be out of date; whoever accesses it without an operator is refused
    kComing,   ///< as kStale, and being gathered
  };
  struct Bucket {
    Tensor whole;
    Tensor own;  ///< this rank's slice of it or, not divided, all of it; in the dtype of parts
    State state = State::kCurrent;
    std::uint64_t ticket = 0;                         ///< kComing
    std::vector<std::unique_ptr<Pinned>> on_its_way;  ///< kComing
    c10::StorageImpl& storage() const { return *whole.storage().unsafeGetStorageImpl(); }
  };

  Tensor own_of(const Tensor& flat) const { return divided_ ? exchange_.own_slice(flat) : flat; }

  // Optimizers may write through aliases of a part, so a write is known by its memory.
  bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept override {
    bool wholes = false;
    for (const Touch& touch : touches) {
      wholes |= touch.what == Touched::kWhole;
      if (touch.what == Touched::kOwn && touch.writes) begin_to_write(touch.bucket);
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
      const Bucket& bucket = buckets_[touch.bucket];
      if (touch.writes && touch.what == Touched::kWhole && bucket.state == State::kCurrent)
        write_back(own_of(bucket.whole), bucket.own);
    }
    --users_;
    if (expecting_) expect();
  }

  // What is written may be on its way to the other ranks.
  void begin_to_write(std::size_t bucket) noexcept {
    if (written_ && !coming_) return;
    const Unrecorded unrecorded;
    const std::lock_guard lock(mutex_);
    try {
      wait(buckets_[bucket]);
    } catch (const std::exception&) {
      // Told when a parameter is read.
    }
    if (options_.offload) lane_->drain();
    written_ = true;
    expect();
  }

  // A step may have been made. Running operators keep what they were given; while parts are written beside
  // the program (held), parameters stay what they were.
  void expect() noexcept {
    expecting_ = true;
    if (users_ > 0 || held_) return;
    for (Bucket& bucket : buckets_) {
      if (bucket.state != State::kCurrent) continue;
      bucket.state = State::kStale;
      mark_stale(bucket.storage(), kStaleMessage);
    }
  }

  void bring(const Touch& touch, bool in_forward) noexcept {
    Bucket& bucket = buckets_[touch.bucket];
    try {
      if (expecting_ && !held_) settle(in_forward);
      wait(bucket);
      if (touch.writes && options_.offload) lane_->drain();
    } catch (const std::exception& error) {
      for (const Bucket& each : buckets_) mark_stale(each.storage(), message_of(error));
    }
  }

  // Asks whether a step has been made, on any rank.
  void settle(bool in_forward) {
    if (divided_ ? anywhere(written_) : written_.load()) return start();
    make_current();
    if (in_forward) expecting_ = false;  // from here on ranks may read different parameters
  }

  void make_current() {
    for (Bucket& bucket : buckets_) {
      if (bucket.state == State::kStale) end(bucket);
    }
  }

  static void end(Bucket& bucket) {
    unmark_stale(bucket.storage());
    bucket.state = State::kCurrent;
  }

  void start() {
    for (Bucket& bucket : buckets_) wait(bucket);
    expecting_ = written_ = false;
    coming_ = true;
    // Buckets are in the order of backward; forward reads them in the other.
    for (std::size_t number = buckets_.size(); number-- > 0;) {
      Bucket& bucket = buckets_[number];
      bucket.state = State::kComing;
      mark_stale(bucket.storage(), kStaleMessage);
      bucket.on_its_way.push_back(std::make_unique<Pinned>(bucket.whole));
      bucket.on_its_way.push_back(std::make_unique<Pinned>(bucket.own));
      bucket.ticket = lane_->submit([this, whole = unchecked(bucket.whole), own = bucket.own] {
        own_of(whole).copy_(own, /*non_blocking=*/true);
        if (divided_) exchange_.all_gather(whole);
      });
    }
  }

  void wait(Bucket& bucket) {
    if (bucket.state != State::kComing) return;
    lane_->wait(bucket.ticket);
    bucket.on_its_way.clear();
    end(bucket);
    coming_ = std::any_of(buckets_.begin(), buckets_.end(),
                          [](const Bucket& each) { return each.state == State::kComing; });
  }

  const bool divided_;
  std::vector<Bucket> buckets_;
  std::mutex mutex_;
  int users_ = 0;                       ///< running operators that touch parameters
  std::atomic<bool> expecting_{false};  ///< a step may have been made, on some rank
  std::atomic<bool> written_{false};    ///< a part of this rank's, since the last gather
  std::atomic<bool> coming_{false};     ///< some bucket is
  bool held_ = false;
};

}  // namespace

std::unique_ptr<Gatherer> gather_after_steps(const std::vector<Tensor>& parameters, ShardLayout layout,
                                             const ProcessGroupPtr& group, int exchange,
                                             const ShardOptions& options) {
  return std::make_unique<AfterSteps>(parameters, std::move(layout), group, exchange, options);
}

}  // namespace reef
