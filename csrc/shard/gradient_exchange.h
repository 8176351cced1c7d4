#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/slice_exchange.h"
#include "reef/shard.h"
#include "shard/flat.h"

namespace reef {

/// A full bucket of this rank's gradients, to be exchanged.
struct GradientBucket {
  using Place = FlatPlace;  ///< in `flat`; what is between those of parameters is zero
  std::size_t number = 0;   ///< of a bucket that is the same parameters in every step
  at::Tensor flat;          ///< all of it
  at::Tensor own;           ///< where the result goes: `flat` itself, or this rank's slice, in `flat` or not
  c10::ArrayRef<Place> places;  ///< of its parameters, in order
};

/// What becomes of a full bucket: one method by which the ranks make one gradient of theirs. It may need
/// several rounds, parameters' shapes, and memory of its own from step to step.
///
/// There are two levels. Ranks that follow each other have a *copy* of what is divided among them: within it
/// gradients are added up, and each rank is left with its slice. *Between* copies ranks with the same slice
/// exchange what their copies have added up. Where nothing is divided each rank is a copy by itself. A method
/// may take both at once, or add up within a copy by SliceSum, and do what is its own between copies.
///
/// exchange() runs on a lane, one call at a time, with the buckets in the same order on every rank. Memory
/// made there is counted as communication. There is an exchange for each lane, and a bucket always comes to
/// the same one.
class GradientExchange {
 public:
  /// `slices`: of a bucket, and ranks of a copy. A number of the shard's own; see SliceExchange.
  GradientExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options);
  virtual ~GradientExchange();
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  /// `bucket.own` becomes the gradient of all ranks, on devices by the current stream; what else is in `flat`
  /// is undefined afterwards. Throws RankFailed.
  virtual void exchange(const GradientBucket& bucket) = 0;
  /// No rank uses what has been exchanged in this step: what is remembered from step to step is what it was
  /// before. Nothing is under way; the next step begins after it.
  virtual void abandon_step() {}
  /// While nothing is under way. What is thrown from now on says in which step it was.
  virtual void begin_step(std::int64_t step) { ranks_.begin_step(step); }
  /// Whether calls of this and of others of its group may run at the same time, and in any order.
  virtual bool in_any_order(c10::Device device) const { return ranks_.in_any_order(device); }

  /// For what else the ranks tell each other on its lane.
  SliceExchange& ranks() { return ranks_; }
  const SliceExchange& ranks() const { return ranks_; }

 protected:
  Reduction reduction() const { return reduction_; }
  /// Whether a copy is several ranks' and `own` is a slice.
  bool divided() const { return divided_; }
  /// Between which ranks what leaves a copy is exchanged.
  RanksAmong between_copies() const { return divided_ ? ranks_.copies() : ranks_.all(); }

 private:
  SliceExchange ranks_;
  Reduction reduction_;
  bool divided_;
};

/// Of the method that the options choose: a line for each.
std::unique_ptr<GradientExchange> make_gradient_exchange(const ProcessGroupPtr& group, int number, int slices,
                                                         const ShardOptions& options);

}  // namespace reef
