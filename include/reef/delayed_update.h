#pragma once

#include <torch/optim/optimizer.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "reef/export.h"
#include "reef/shard.h"

namespace reef {

/// The parts of a shard, while something on another thread updates them: meanwhile the module's parameters
/// stay what they are. For optimizers that are not LibTorch's; DelayedUpdate is made of this.
class REEF_API UpdateBeside {
 public:
  /// The shard must outlive this. Throws ConfigError if its parts are not copies (ShardOptions::offload), at
  /// Stage::kParameters, which keeps no second copy, and if there is another.
  explicit UpdateBeside(Shard& shard);
  /// Waits.
  ~UpdateBeside();
  UpdateBeside(const UpdateBeside&) = delete;
  UpdateBeside& operator=(const UpdateBeside&) = delete;

  /// After backward: the parameters become what the update before this one has made of the parts, and stay
  /// so. The gradients of the parts are the update's. All ranks alike. Throws RankFailed.
  void begin();
  /// On the update's thread, before it writes parts: until their values have been read.
  void wait_for_parts();
  /// On the update's thread, in any case: its gradients are let go.
  void end() noexcept;
  /// Until no update is under way. Backward does so before it gives new gradients.
  void wait();
  bool under_way() const;
  /// As wait(), and the parameters become what the parts are when an operator first reads one. All ranks
  /// alike.
  void finish();

 private:
  friend class Shard;
  Shard::Parts* parts_;
  std::function<void()> parts_are_read_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool under_way_ = false;
};

/// An optimizer whose step runs beside the next forward and backward pass, on a thread of its own: one-step
/// delayed parameter update (ZeRO-Offload, 2101.06840, section 5.2), for a shard whose parts are in host
/// memory.
///
///     auto sharded = reef::shard(*model, group, {.stage = reef::Stage::kGradients, .offload = true});
///     torch::optim::AdamW adam(sharded.parameters(), 1e-3);
///     reef::DelayedUpdate optimizer(adam, sharded);
///     // the training loop as it was, and after it, and before an evaluation:
///     optimizer.finish();
///
/// It trains otherwise than without it, exactly so: with p(t) for what step t makes, and p(-1) = p(0), the
/// gradient of step t is that at p(t - 2), and p(t) = step(p(t - 1), that gradient). finish() ends the delay
/// until the next step. Options (the learning rate, for a scheduler) are changed here, not in `optimizer`,
/// which is this one's while it steps; what a program writes into parameters or states, it writes after
/// finish(). What a step throws is thrown by the next one, or by finish().
/// Memory beside the shard's: at kReplicate and kOptimizer on a CPU, a copy of the gradients of the parts.
class REEF_API DelayedUpdate final : public torch::optim::Optimizer {
 public:
  /// `optimizer` over shard.parameters(). Both must outlive this. Throws ConfigError as UpdateBeside.
  DelayedUpdate(torch::optim::Optimizer& optimizer, Shard& shard);
  /// Waits; what a step has thrown is lost.
  ~DelayedUpdate() override;

  /// Begins the step, when the one before has ended. All ranks alike. A closure is refused with ConfigError.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Of gradients that are no step's. Not by a torch::optim::Optimizer&, whose zero_grad() knows no steps.
  void zero_grad(bool set_to_none = true);
  /// Until the step has ended; the module's parameters are the newest then. All ranks alike, before an
  /// evaluation, and before saving what is to go on exactly.
  void finish();

  /// As `optimizer`, after its step.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void serve();
  void wait();

  torch::optim::Optimizer& optimizer_;
  mutable UpdateBeside beside_;
  std::mutex mutex_;
  std::condition_variable begun_;
  bool stepping_ = false;
  bool closing_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace reef
