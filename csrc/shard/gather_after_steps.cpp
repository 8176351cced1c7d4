#include <algorithm>
#include <atomic>
#include <mutex>

#include "page/pinned.h"
#include "page/storage_access.h"
#include "reef/error.h"
#include "shard/gatherer.h"

namespace reef {
namespace {

using at::Tensor;

class AfterSteps final : public Gatherer {
 public:
  AfterSteps(const std::vector<Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
             int exchange, const ShardOptions& options)
      : Gatherer(parameters, std::move(layout), group, exchange, options),
        divided_(options.stage != Stage::kReplicate),
        buckets_(layout_.buckets.size()) {
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      Bucket& bucket = buckets_[number];
      const Flat flat = flatten(parameters, number);
      bucket.flat = flat.whole;
      if (options.offload || !flat.exact.is_same(flat.whole)) bucket.masters = kept(own(flat.exact));
      const Tensor& parts = bucket.masters.defined() ? bucket.masters : bucket.flat;
      if (divided_) {
        keep_parts(parameters, number, parts);
      } else {
        keep_whole(parameters, number, parts);
      }
    }
    std::vector<Tensor> flats, masters;
    for (const Bucket& bucket : buckets_) {
      flats.push_back(bucket.flat);
      masters.push_back(bucket.masters);
    }
    observe(flats, masters);
  }
  ~AfterSteps() override { close(); }

  void expect_step() override { expecting_ = true; }

  bool can_hold() const override { return options_.offload; }
  std::function<void()> hold() override {
    const std::lock_guard lock(mutex_);
    if (held_) start();
    held_ = true;
    return [this] {
      lane_->wait_all();
      lane_->drain();
    };
  }
  void release() override {
    const std::lock_guard lock(mutex_);
    if (!held_) return;
    held_ = false;
    expecting_ = true;
  }

  void gather() override {
    const std::lock_guard lock(mutex_);
    start();
    for (Bucket& bucket : buckets_) wait(bucket);
  }

 private:
  struct Bucket {
    Tensor flat;
    Tensor masters;  ///< of this rank's slice or, not divided, of all; undefined: the flat has the parts
    std::uint64_t ticket = 0;  ///< 0: it is there
    std::vector<std::unique_ptr<Pinned>> on_its_way;
  };

  // Of a flat: what masters are of.
  Tensor own(const Tensor& flat) const { return divided_ ? exchange_.own_slice(flat) : flat; }

  // Optimizers may write through aliases of a part, so a write is known by its memory.
  bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept override {
    bool to_masters = false;
    for (const Touch& touch : touches) {
      if (!touch.writes) continue;
      if (coming_) await(touch.bucket);
      if (touch.what != Touched::kSlice && buckets_[touch.bucket].masters.defined()) {
        to_masters = true;
      } else {
        expecting_ = written_ = true;
      }
    }
    if (!expecting_ && !coming_) return to_masters;
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kParameter) read(touch.bucket, call.records_gradient);
    }
    return to_masters;
  }

  void ends(const std::vector<Touch>& touches) noexcept override {
    for (const Touch& touch : touches) {
      const Bucket& bucket = buckets_[touch.bucket];
      if (touch.writes && touch.what != Touched::kSlice && bucket.masters.defined())
        write_back(own(bucket.flat), bucket.masters);
    }
  }

  // An operator is about to read a parameter of this bucket.
  void read(std::size_t bucket, bool in_forward) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      if (held_) {
        // Parts are being written, and parameters are not.
      } else if (expecting_ && (divided_ ? anywhere(written_) : written_.load())) {
        start();
      } else if (in_forward) {
        expecting_ = false;  // the step was left out: from here on ranks may read different parameters
      }
      wait(buckets_[bucket]);
    } catch (const std::exception& error) {
      for (const Bucket& each : buckets_)
        refuse_access(*each.flat.storage().unsafeGetStorageImpl(), message_of(error));
    }
  }

  // An operator is about to write where something may be on its way from.
  void await(std::size_t bucket) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      wait(buckets_[bucket]);
    } catch (const std::exception&) {
      // Told when a parameter is read.
    }
    if (options_.offload) lane_->drain();
  }

  void start() {
    for (Bucket& bucket : buckets_) wait(bucket);
    expecting_ = written_ = false;
    coming_ = true;
    // Buckets are in the order of backward; forward reads them in the other.
    for (std::size_t number = buckets_.size(); number-- > 0;) {
      Bucket& bucket = buckets_[number];
      bucket.on_its_way.push_back(std::make_unique<Pinned>(bucket.flat));
      if (bucket.masters.defined()) bucket.on_its_way.push_back(std::make_unique<Pinned>(bucket.masters));
      bucket.ticket = lane_->submit([this, flat = bucket.flat, masters = bucket.masters] {
        if (masters.defined()) own(flat).copy_(masters, /*non_blocking=*/true);
        if (divided_) exchange_.all_gather(flat);
      });
    }
  }

  void wait(Bucket& bucket) {
    if (bucket.ticket == 0) return;
    lane_->wait(bucket.ticket);
    bucket.ticket = 0;
    bucket.on_its_way.clear();
    coming_ =
        std::any_of(buckets_.begin(), buckets_.end(), [](const Bucket& each) { return each.ticket != 0; });
  }

  const bool divided_;
  std::vector<Bucket> buckets_;
  std::mutex mutex_;
  std::atomic<bool> expecting_{false};
  std::atomic<bool> written_{false};  ///< a part of this rank's, since the last gather
  std::atomic<bool> coming_{false};   ///< something is on its way
  bool held_ = false;
};

}  // namespace

std::unique_ptr<Gatherer> gather_after_steps(const std::vector<Tensor>& parameters, ShardLayout layout,
                                             const ProcessGroupPtr& group, int exchange,
                                             const ShardOptions& options) {
  return std::make_unique<AfterSteps>(parameters, std::move(layout), group, exchange, options);
}

}  // namespace reef
