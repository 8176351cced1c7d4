#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "distributed/slice_exchange.h"
#include "reef/shard.h"
#include "shard/exchange_memory.h"
#include "shard/flat.h"

namespace reef {

/// A full bucket of this rank's gradients, to be exchanged.
struct GradientBucket {
  using Place = FlatPlace;  ///< in `flat`; what is between those of parameters is zero
  std::size_t number = 0;   ///< of a bucket that is the same parameters in every step
  at::Tensor flat;          ///< all of it
  at::Tensor own;           ///< where the result goes: `flat` itself, or this rank's slice, in `flat` or not
  c10::ArrayRef<Place> places;  ///< of its parameters, in order
  /// Told, by a method that says so (finds_nonfinite()), of something that is not finite: in `flat`, which is
  /// still as it was given, or in `own`, which is what has come of it.
  enum class Where : std::uint8_t { kFlat, kOwn };
  std::function<void(Where)> nonfinite_found = {};
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
/// the same one. What is remembered from step to step is in its ExchangeMemory: for steps that no rank uses,
/// for state dicts and for other ranks nothing is left to do.
class GradientExchange {
 public:
  /// `slices`: of a bucket, and ranks of a copy. A number of the shard's own; see SliceExchange. `memory`:
  /// what it declares to remember, alike on all ranks.
  GradientExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options,
                   ExchangeMemory memory = {});
  virtual ~GradientExchange();
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  /// `bucket.own` becomes the gradient of all ranks, on devices by the current stream; what else is in `flat`
  /// is undefined afterwards. Throws RankFailed.
  virtual void exchange(const GradientBucket& bucket) = 0;
  /// Whether exchange() tells of what is not finite in this bucket, since it looks at all elements anyway.
  virtual bool finds_nonfinite(const GradientBucket& /*bucket*/) const { return false; }
  /// No rank uses this step for so many elements of the bucket, from `first` on: those of a parameter that
  /// has no gradient on any. Before end_step().
  void leave_out(std::size_t bucket, std::int64_t first, std::int64_t elements) {
    memory_.leave_out(bucket, first, elements, ranks_.copy().place);
  }
  /// Whether ranks have used what has been exchanged since the step began; if not, what is remembered is what
  /// it was before. Nothing is under way; the next step begins after it.
  virtual void end_step(bool used);
  /// Whether what comes of this step's buckets is a momentum, and no gradient.
  virtual bool gives_momentum() const { return false; }
  /// While nothing is under way. What is thrown from now on says in which step it was.
  virtual void begin_step(std::int64_t step) { ranks_.begin_step(step); }
  /// Whether calls of this and of others of its group may run at the same time, and in any order.
  virtual bool in_any_order(c10::Device device) const { return ranks_.in_any_order(device); }

  /// For what else the ranks tell each other on its lane.
  SliceExchange& ranks() { return ranks_; }
  const SliceExchange& ranks() const { return ranks_; }
  ExchangeMemory& memory() { return memory_; }
  const ExchangeMemory& memory() const { return memory_; }

 protected:
  Reduction reduction() const { return reduction_; }
  /// Whether a copy is several ranks' and `own` is a slice.
  bool divided() const { return divided_; }
  /// Between which ranks what leaves a copy is exchanged.
  RanksAmong between_copies() const { return divided_ ? ranks_.copies() : ranks_.all(); }

 private:
  SliceExchange ranks_;
  ExchangeMemory memory_;
  Reduction reduction_;
  bool divided_;
};

/// Parameters whose gradients are exchanged, as items of a layout: who has which of them.
class ExchangedParameters {
 public:
  ExchangedParameters() = default;
  virtual ~ExchangedParameters() = default;
  ExchangedParameters(const ExchangedParameters&) = delete;
  ExchangedParameters& operator=(const ExchangedParameters&) = delete;

  /// Which has this bucket's gradients. While no pass is under way.
  virtual GradientExchange& exchange_of(std::size_t bucket) = 0;
  /// Where the parameter lies in its bucket.
  virtual const FlatPlace& flat_place_of(std::size_t item) const = 0;
  /// In which its gradients are added up.
  virtual at::ScalarType dtype_of_sums(std::size_t item) const = 0;
};

/// Of the method that the options choose: a line for each.
std::unique_ptr<GradientExchange> make_gradient_exchange(const ProcessGroupPtr& group, int number, int slices,
                                                         const ShardOptions& options);

}  // namespace reef
