#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distributed/comm_lane.h"
#include "distributed/slice_exchange.h"
#include "observer/observer.h"
#include "reef/shard.h"
#include "reef/shard_layout.h"
#include "shard/dtypes.h"
#include "shard/flat.h"
#include "shard/flat_bucket.h"

namespace reef {

/// Keeps parameters in flat buckets, and the parts of them that this rank's optimizer steps in memory of
/// their own; makes parameters whole again when an operator touches their memory after a step. An error is
/// thrown where the operator asks for the memory, because one thrown in an observer would not be heard of.
class Gatherer {
 public:
  virtual ~Gatherer();
  Gatherer(const Gatherer&) = delete;
  Gatherer& operator=(const Gatherer&) = delete;

  /// This rank's parts, one after another.
  const std::vector<KeptPart>& parts() const { return parts_; }
  std::int64_t sent_bytes() const { return exchange_.sent_bytes(); }
  /// Of gathered parameters, that may stay.
  virtual std::int64_t resident_bytes() const { return 0; }

  /// What is thrown from now on says in which step it was.
  virtual void begin_step(std::int64_t step) {
    exchange_.begin_step(step);
    step_number_ = step;
  }
  /// Gradients have been reduced: a step may follow, on all ranks alike.
  virtual void expect_step() = 0;
  /// All of every bucket, whatever was written. Throws RankFailed.
  virtual void gather() = 0;

  /// Waits for what this rank has begun to gather. Where ranks use parameters in different orders, others
  /// have to answer() until all ranks have called this; then none has begun a gather that another has not.
  virtual void settle() {}
  /// What other ranks gather and this one does not, this one takes part in while it waits in the gatherer,
  /// and when it calls this. False: it cannot, so a pass that fails on this rank leaves the others waiting.
  virtual bool answer() { return true; }
  /// This rank's pass has failed: the others ask at once.
  virtual void tell_failed() {}
  /// Ranks use parameters in different orders.
  virtual void ask_at_once() {}
  /// The pass is abandoned on all ranks, which answer() until all of them have called this.
  virtual void abandon_pass() {}

  /// Parts are copies of parameters, which can be written while these stay as they are.
  virtual bool can_hold() const { return false; }
  /// Parameters become what parts are, if that was put off by an earlier call, and from now on it is put off.
  /// What is returned waits until parts may be written. All ranks alike.
  virtual std::function<void()> hold() {
    return [] {};
  }
  /// Not any longer: parameters become what parts are when an operator first reads one. All ranks alike.
  virtual void release() {}

 protected:
  /// Moves parameters to the memory of their buckets, one bucket after another, and makes this rank's parts.
  /// Calls `moved` with each bucket, which is in kHere.
  Gatherer(const std::vector<at::Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
           int exchange, const ShardOptions& options, const std::function<void(FlatBucket&)>& moved);

  /// This rank's slice of it or, not divided, all of it.
  at::Tensor own_of(const at::Tensor& whole) const { return divided_ ? exchange_.own_slice(whole) : whole; }
  /// What a program has written into its parameters, alike on all ranks (loads a file, makes them anew), goes
  /// to memory that parts have of their own. What fails is thrown there.
  void write_back(const FlatBucket& bucket) const noexcept;

  /// What memory of a bucket an operator reads or writes, whichever tensor it was given.
  enum class Touched : std::uint8_t {
    kWhole,  ///< that of the module's parameters
    kOwn,    ///< that of this rank's parts
  };
  struct Touch {
    std::size_t bucket;
    Touched what;
    bool writes;
  };
  /// Called on any thread before an operator that touches memory of buckets. If it returns true, ends() is
  /// called when the outermost such operator on that thread has ended, since kernels keep the addresses that
  /// the operators they called were given.
  virtual bool begins(const OperatorCall& call, const std::vector<Touch>& touches) noexcept = 0;
  virtual void ends(const std::vector<Touch>& touches) noexcept = 0;
  /// No step was made: what is stale is not out of date.
  void confirm();

  /// Begins to observe operators on the buckets. To be called by constructors, at the end.
  void observe();
  /// They are not observed any more, and what is on its way has come. To be called by destructors.
  void close();

  /// Whether a step may have been made since parameters became what parts are.
  enum class Step : std::uint8_t {
    kNone,
    kExpected,  ///< on some rank
    kMade,      ///< on this rank, which has written a part
  };

  /// Whether any rank says so.
  bool anywhere(bool here) { return largest({here ? 1 : 0}).front() != 0; }
  /// Of each of these, the largest that a rank gives.
  std::vector<std::int64_t> largest(const std::vector<std::int64_t>& here);
  /// Waits for work of a lane.
  virtual void await(CommLane& lane, std::uint64_t ticket) { lane.wait(ticket); }

  ShardLayout layout_;
  ShardOptions options_;
  ShardPlace place_;
  bool divided_;  ///< parts are not whole
  std::vector<FlatBucket> buckets_;
  std::vector<KeptPart> parts_;
  c10::Device device_;
  SliceExchange exchange_;
  std::unique_ptr<CommLane> lane_;

 private:
  class Listener;
  static Listener& listener();

  FlatBucket move(const std::vector<at::Tensor>& parameters, std::size_t bucket) const;
  void keep_parts(const std::vector<at::Tensor>& parameters, std::size_t bucket);

  std::string name_;  ///< of the shard
  std::int64_t step_number_ = 0;
  std::unique_ptr<OperatorObservation> observation_;
};

/// Stages kOptimizer and kGradients: whole buckets stay in memory. They are out of date when a part may have
/// been written on any rank, which is so once gradients have been reduced. Then the first operator that
/// touches one makes the ranks ask each other, since a rank may have nothing to step; if a part has been
/// written, all buckets are gathered, in the order of use, and an operator waits for those that it touches.
/// Whoever accesses a bucket without an operator while it is out of date is refused. Stage kReplicate, with
/// masters of all parameters on every rank: the same, but nothing is sent.
std::unique_ptr<Gatherer> gather_after_steps(const std::vector<at::Tensor>& parameters, ShardLayout layout,
                                             const ProcessGroupPtr& group, int exchange,
                                             const ShardOptions& options);

/// Stage kParameters: of a bucket there is the slice, and all of it while operators use it, and before and
/// after as long as `resident_bytes` hold it. Operators must use buckets in the same order on all ranks.
std::unique_ptr<Gatherer> gather_on_demand(const std::vector<at::Tensor>& parameters, ShardLayout layout,
                                           const ProcessGroupPtr& group, int exchange,
                                           const ShardOptions& options);

}  // namespace reef
