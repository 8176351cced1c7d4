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
             int exchange)
      : Gatherer(std::move(layout), group, exchange),
        tickets_(layout_.buckets.size(), 0),
        on_its_way_(layout_.buckets.size()) {
    for (std::size_t bucket = 0; bucket < layout_.buckets.size(); ++bucket) {
      flats_.push_back(flatten(parameters, bucket));
      keep_parts(parameters, bucket, flats_.back());
    }
    observe(flats_, {});
  }
  ~AfterSteps() override { close(); }

  void expect_step() override { expecting_ = true; }

  void gather() override {
    const std::lock_guard lock(mutex_);
    start();
    for (std::size_t bucket = 0; bucket < flats_.size(); ++bucket) wait(bucket);
  }

 private:
  // Optimizers may write through aliases of a part, so a write is known by its memory.
  bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept override {
    for (const Touch& touch : touches) {
      if (touch.writes) expecting_ = written_ = true;
    }
    if (!expecting_ && !coming_) return false;
    for (const Touch& touch : touches) {
      if (touch.what == Touched::kParameter) read(touch.bucket, call.records_gradient);
    }
    return false;
  }

  // An operator is about to read a parameter of this bucket.
  void read(std::size_t bucket, bool in_forward) noexcept {
    const std::lock_guard lock(mutex_);
    try {
      if (expecting_ && anywhere(written_)) {
        start();
      } else if (in_forward) {
        expecting_ = false;  // the step was left out: from here on ranks may read different parameters
      }
      wait(bucket);
    } catch (const std::exception& error) {
      for (const Tensor& flat : flats_)
        refuse_access(*flat.storage().unsafeGetStorageImpl(), message_of(error));
    }
  }

  void start() {
    for (std::size_t bucket = 0; bucket < flats_.size(); ++bucket) wait(bucket);
    expecting_ = written_ = false;
    coming_ = true;
    // Buckets are in the order of backward; forward reads them in the other.
    for (std::size_t bucket = flats_.size(); bucket-- > 0;) {
      on_its_way_[bucket] = std::make_unique<Pinned>(flats_[bucket]);
      tickets_[bucket] = lane_->submit([this, flat = flats_[bucket]] { exchange_.all_gather(flat); });
    }
  }

  void wait(std::size_t bucket) {
    if (tickets_[bucket] == 0) return;
    lane_->wait(tickets_[bucket]);
    tickets_[bucket] = 0;
    on_its_way_[bucket].reset();
    coming_ = std::any_of(tickets_.begin(), tickets_.end(), [](std::uint64_t ticket) { return ticket != 0; });
  }

  std::vector<Tensor> flats_;
  std::mutex mutex_;
  std::atomic<bool> expecting_{false};
  std::atomic<bool> written_{false};    ///< a part of this rank's, since the last gather
  std::atomic<bool> coming_{false};     ///< something is on its way
  std::vector<std::uint64_t> tickets_;  ///< by bucket; 0: it is there
  std::vector<std::unique_ptr<Pinned>> on_its_way_;
};

}  // namespace

std::unique_ptr<Gatherer> gather_after_steps(const std::vector<Tensor>& parameters, ShardLayout layout,
                                             const ProcessGroupPtr& group, int exchange) {
  return std::make_unique<AfterSteps>(parameters, std::move(layout), group, exchange);
}

}  // namespace reef
