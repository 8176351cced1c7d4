#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "distributed/comm_lane.h"
#include "distributed/slice_exchange.h"
#include "observer/observer.h"
#include "page/pinned.h"
#include "reef/shard_layout.h"
#include "shard/flat.h"

namespace reef {

/// Parameters in flat buckets, of which each rank's optimizer writes its slices: what the others have made of
/// theirs is fetched when an operator first reads a parameter after a part has been written, on any rank (a
/// rank may have nothing to step, so they ask each other, once gradients have been reduced). All buckets are
/// fetched then, in the order of use, and an operator waits for those that it reads.
class Gatherer {
 public:
  /// Moves the parameters' memory into buckets. Those of `layout`, by item.
  Gatherer(const std::vector<at::Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group);
  /// Waits for what is on its way.
  ~Gatherer();
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  /// This rank's parts, one after another.
  const std::vector<KeptPart>& parts() const { return parts_; }

  /// Gradients have been reduced: a step may follow, on all ranks alike.
  void expect_step() { expecting_ = true; }
  /// Now, whatever was written, and to the end. Throws RankFailed.
  void gather();
  std::int64_t sent_bytes() const { return exchange_.sent_bytes(); }

 private:
  class Listener;
  static Listener& listener();
  void read(std::size_t bucket, bool in_forward) noexcept;
  void wrote();
  bool written_anywhere();
  void start();
  void wait(std::size_t bucket);
  void refuse(const std::exception& error) noexcept;

  ShardLayout layout_;
  std::vector<at::Tensor> flats_;
  std::vector<KeptPart> parts_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> bucket_of_;  ///< by parameter
  std::mutex mutex_;
  std::atomic<bool> expecting_{false};
  std::atomic<bool> written_{false};    ///< a part of this rank's, since the last gather
  std::atomic<bool> coming_{false};     ///< something is on its way
  std::vector<std::uint64_t> tickets_;  ///< by bucket; 0: it is there
  std::vector<std::unique_ptr<Pinned>> on_its_way_;
  SliceExchange exchange_;
  CommLane lane_;
  std::unique_ptr<OperatorObservation> observation_;
};

}  // namespace reef
