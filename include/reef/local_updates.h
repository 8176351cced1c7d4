#pragma once

#include <cstdint>
#include <memory>

#include "reef/collectives.h"
#include "reef/compression.h"
#include "reef/export.h"
#include "reef/optimizer_state.h"
#include "reef/shard.h"

namespace reef {

struct LocalUpdatesOptions {
  /// H: so many steps of each rank's own are a round, and an outer step follows.
  std::int64_t local_steps = 50;
  /// Of the outer step: SGD on the parameters of the round's start, whose gradient is the mean over the ranks
  /// of what their steps have taken from these. 0.7 and 0.9 with `nesterov` are DiLoCo's (2311.08105, section
  /// 3.1). A rate of 1 without momentum is the mean of the parameters (local SGD).
  double outer_lr = 0.7;
  double outer_momentum = 0.9;  ///< 0: none
  bool nesterov = true;         ///< without momentum it makes no difference
  /// By which that gradient travels. What is held back is added to the next round's; see state().
  Compression compression = Compression::kNone;
  CompressionOptions compression_options = {};
  /// Parameters are cut, in the module's order, into so many parts of about as many elements, whose outer
  /// steps are spread evenly over the round: that of part p (from 0) after floor(H (p + 1) / parts) of its
  /// steps (Streaming DiLoCo, 2501.18512, section 2.2.1). At most as many as parameters, and as local_steps.
  std::int64_t parts = 1;
  /// The exchange of an outer step is begun so many steps before it is applied, and goes on beside them.
  /// Less than local_steps.
  std::int64_t overlap_steps = 0;
  /// What is left of a rank's own parameters where an outer step is applied (alpha in 2501.18512, section
  /// 2.2.2): they become mixing times themselves, plus 1 - mixing times what all ranks have. From 0 (they
  /// are replaced) to less than 1.
  double mixing = 0;
  /// Other ranks than the shard's: one of each copy, which have the same parts (names()) in all of them; the
  /// shard's group is the ranks of this rank's copy, which train together as ever, at any stage. If it is not
  /// given, every rank of the shard is by itself, at Stage::kReplicate.
  ProcessGroupPtr between_copies = {};
};

/// Training that communicates once in many steps: each rank takes local_steps steps of its own, of which not
/// a byte is sent, and an outer step makes one model of what all of them have learnt. States of the
/// optimizer, gradients and clipping stay each rank's.
///
///     auto sharded = reef::shard(*model, group);
///     torch::optim::AdamW optimizer(sharded.parameters(), 1e-3);
///     reef::LocalUpdates updates(sharded, {.local_steps = 50});
///     // the training loop as it was, and after optimizer.step():
///     updates.step();
///     // before an evaluation, or at the end:
///     updates.finish();
///
/// Results are those of one process that takes all ranks' steps and outer steps, bit for bit, for any number
/// of parts and steps of overlap, however long messages take. With s for the parameters that a round has
/// started from, w for a rank's, and g for the mean over the ranks of s - w, added up in the order of ranks
/// and divided last, in the parameters' dtype (masters', where there are any):
///     b = momentum * b + g,   s = s - lr * (nesterov ? momentum * b + g : b),   w = s,
/// where each product, sum and difference is rounded by itself (torch::optim::SGD fuses some). With lr 1, no
/// momentum and no compression the parameters themselves travel, so w is what Shard::average_parameters()
/// gives, bit for bit; by the recurrence it would be so within rounding. A parameter's dtype is that of all
/// of this.
///
/// Bytes that a rank sends for a part in a round: what the exchange of its gradients would take, which is
/// 2 (N - 1) / N of the part's without compression; at the end of a round buffers become what
/// ShardOptions::buffers says. Memory: s and b, each the bytes of the shard's parameters() (none of them for
/// the mean; no b without momentum), and a part's while its exchange is under way. They are counted as
/// optimizer state, and what travels as communication.
class REEF_API LocalUpdates {
 public:
  /// From now on passes of backward send nothing, where between_copies is not given. Every rank begins with
  /// the parameters of rank 0. All ranks alike; the shard must outlive this. Throws ConfigError on all ranks
  /// if options differ or cannot be used, if the ranks' parts are not the same, at a stage that divides
  /// without between_copies, beside a DelayedUpdate, and for a shard that has one.
  explicit LocalUpdates(Shard& shard, const LocalUpdatesOptions& options = {});
  /// Waits for an exchange that is under way. Parameters stay as they are; see finish().
  ~LocalUpdates();
  LocalUpdates(const LocalUpdates&) = delete;
  LocalUpdates& operator=(const LocalUpdates&) = delete;

  /// After a step of this rank's optimizer: applies the outer step that is due, and begins the exchange of
  /// the next. Throws RankFailed, and RanksOutOfStep where another rank has gone on to something else; the
  /// parameters are what they were.
  void step();
  /// Ends the round early: applies what is under way, and takes an outer step of every part that has been
  /// stepped since its last. All ranks have the same parameters then, and a round begins. All ranks alike.
  /// Throws ConfigError on all ranks if they have not taken as many steps, and as step().
  void finish();
  /// For a program that has written parameters (Shard::load_state_dict() calls it): those of rank 0 begin a
  /// round on all ranks. Exchanges that are under way are dropped; what the outer optimizer and the
  /// compression remember stays. All ranks alike.
  void begin_round();

  /// Steps since the last round that has begun by itself: by construction, finish() or begin_round().
  std::int64_t local_step() const;
  /// Bytes that this rank has sent for outer steps. Waits for an exchange that is under way.
  std::int64_t sent_bytes() const;

  /// To go on exactly, at any step: this rank's parameters, those of the round's start, momentum, what is
  /// held back, what is under way (for which it waits), and the step, as data that torch::save() writes. It
  /// shares their memory. The optimizer's and the buffers are saved beside it. Sends nothing.
  OptimizerState state() const;
  /// Of this rank, as state() gave it to the same rank of as many. All ranks alike, after the module's and
  /// the optimizer's. Throws ConfigError on all ranks, and nothing has changed, if it is of another number of
  /// ranks, of another rank, of other parameters or buckets, or of other options than the outer rate
  /// and momentum, and if the ranks' states are not of one step and round. To go on with another
  /// number of ranks, save the module after finish().
  void load_state(const OptimizerState& own);

 private:
  struct Rounds;
  std::unique_ptr<Rounds> rounds_;
};

}  // namespace reef
