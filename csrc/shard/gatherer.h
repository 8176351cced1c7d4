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
    step_ = step;
  }
  /// Gradients have been reduced: a step may follow, on all ranks alike.
  virtual void expect_step() = 0;
  /// All of every bucket, whatever was written. Throws RankFailed.
  virtual void gather() = 0;

  /// What other ranks gather and this one does not, this one takes part in while it waits in the gatherer,
  /// and when it calls this. False: it cannot, so a pass that fails on this rank leaves the others waiting.
  virtual bool answer() { return true; }
  /// This rank's pass has failed: the others ask at once.
  virtual void tell_failed() {}
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
  Gatherer(const std::vector<at::Tensor>& parameters, ShardLayout layout, const ProcessGroupPtr& group,
           int exchange, const ShardOptions& options);

  /// Of a bucket of these parameters, before they are moved and after it.
  ParameterDtypes dtypes(const std::vector<at::Tensor>& parameters, std::size_t bucket) const;

  /// A bucket's parameters in one flat tensor, and in the dtype of parts, as they were before: the same
  /// tensor where that is the same.
  struct Flat {
    at::Tensor whole;
    at::Tensor exact;
  };
  /// Moves them there.
  Flat flatten(const std::vector<at::Tensor>& parameters, std::size_t bucket);
  /// Makes memory for parts, with these values.
  at::Tensor kept(const at::Tensor& own) const;
  /// What a program has written into its parameters, alike on all ranks (loads a file, makes them anew), goes
  /// to memory that parts have of their own. What fails is thrown there.
  static void write_back(const at::Tensor& own, const at::Tensor& kept) noexcept;
  /// This rank's parts of a bucket. `slice` is its slice, or all of the bucket.
  void keep_parts(const std::vector<at::Tensor>& parameters, std::size_t bucket, const at::Tensor& slice);
  /// All of it, as this rank's masters.
  void keep_whole(const std::vector<at::Tensor>& parameters, std::size_t bucket, const at::Tensor& flat);

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
  /// Begins to observe operators on the memory of the buckets' parameters and of this rank's parts.
  void observe(const std::vector<at::Tensor>& wholes, const std::vector<at::Tensor>& own);
  /// No more, and what is on its way has come. To be called by destructors.
  void close();

  /// Whether any rank says so.
  bool anywhere(bool here) { return largest({here ? 1 : 0}).front() != 0; }
  /// Of each of these, the largest that a rank gives.
  std::vector<std::int64_t> largest(const std::vector<std::int64_t>& here);
  /// Waits for work of a lane.
  virtual void await(CommLane& lane, std::uint64_t ticket) { lane.wait(ticket); }

  ShardLayout layout_;
  ShardOptions options_;
  int place_;  ///< whose slices are this rank's
  int copy_;   ///< among how many that have them before
  std::vector<KeptPart> parts_;
  c10::Device device_;
  SliceExchange exchange_;
  std::unique_ptr<CommLane> lane_;

 private:
  class Listener;
  static Listener& listener();

  at::Tensor packed(const std::vector<at::Tensor>& parameters, std::size_t bucket,
                    at::ScalarType dtype) const;

  std::string name_;  ///< of the shard
  std::int64_t step_ = 0;
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
