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
  /// The number of local steps in a round (H in the papers), after which an outer step follows.
  std::int64_t local_steps = 50;
  /// The learning rate of the outer step, which is SGD on the parameters at the round's start. Its gradient
  /// is the mean over the ranks of how far their local steps have moved away from these. 0.7, and 0.9 with
  /// `nesterov`, are DiLoCo's values (2311.08105, section 3.1). A rate of 1 without momentum averages the
  /// parameters (local SGD).
  double outer_lr = 0.7;
  double outer_momentum = 0.9;  ///< 0 is none
  bool nesterov = true;         ///< makes no difference without momentum
  /// How the outer gradient travels. What a method holds back is added to the next round's; see state().
  Compression compression = Compression::kNone;
  CompressionOptions compression_options = {};
  /// The number of parts into which the parameters are cut, in the module's order and of about as many
  /// elements each. Their outer steps are spread evenly over the round: part p (counted from 0) has its own
  /// after floor(H (p + 1) / parts) local steps (Streaming DiLoCo, 2501.18512, section 2.2.1). At most the
  /// number of parameters, and at most local_steps.
  std::int64_t parts = 1;
  /// The number of local steps that run beside the exchange of an outer step: the exchange begins so many
  /// steps before its result is applied. Less than local_steps.
  std::int64_t overlap_steps = 0;
  /// The share that a rank keeps of its own parameters when an outer step is applied (alpha in 2501.18512,
  /// section 2.2.2): they become `mixing` times themselves plus 1 - `mixing` times the common ones. From 0,
  /// which replaces them, to less than 1.
  double mixing = 0;
  /// The group across copies, for copies that are divided among several ranks: it has one rank of each copy,
  /// and all of its ranks keep the same parts (names()). The shard's own group is then this rank's copy,
  /// whose ranks train together at any stage. If it is not given, every rank of the shard is a copy by
  /// itself, at Stage::kReplicate.
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
