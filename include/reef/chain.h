#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reef/chain_profile.h"
#include "reef/chain_solver.h"
#include "reef/checkpoint.h"
#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/schedule.h"
#include "reef/tier.h"

namespace torch::nn {
class Module;
class Sequential;
}  // namespace torch::nn

namespace reef {

/// Stages that are run one after another, each on the output of the one before. What a stage does inside, and
/// what it captures (parameters, buffers, branches), is its own business; it must compute the same when it is
/// run again, as for checkpoint().
class REEF_API Chain {
 public:
  using Stage = std::function<at::Tensor(const at::Tensor&)>;
  /// Says as text what a stage's costs depend on besides its input, as it is now. `gradients`: and which
  /// parameters have one.
  using State = std::function<std::string(bool gradients)>;

  Chain() = default;
  explicit Chain(const std::vector<Stage>& stages);
  /// A stage for each place of `modules`, a module that stands at several among them; the modules are shared,
  /// and named as they are there. Throws ConfigError where it is used after a layer was added.
  explicit Chain(const torch::nn::Sequential& modules);

  void add(std::string name, Stage stage, State state = {});
  /// Adds a stage that runs this module, and whose state is the module's.
  void add(std::string name, std::shared_ptr<torch::nn::Module> module, Stage stage);
  std::size_t size() const { return links_.size(); }
  const std::string& name(std::size_t stage) const { return links_.at(stage).name; }  ///< from 0
  at::Tensor run(std::size_t stage, const at::Tensor& input) const { return links_.at(stage).stage(input); }
  /// Returns the function that run() calls. A copy of it keeps only this stage alive.
  const Stage& function(std::size_t stage) const { return links_.at(stage).stage; }
  /// The modules that a stage runs, by name; none where it was added without one.
  using Modules = std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>>;
  const Modules& modules(std::size_t stage) const { return links_.at(stage).modules; }
  /// All of them.
  at::Tensor operator()(at::Tensor input) const;

  /// Makes one of two stages, from 0: `stage` and the one before it.
  void join(std::size_t stage);
  /// Of how many stages that were added each of them consists.
  std::vector<std::size_t> parts() const;
  /// Joins stages until these are its parts. Throws ConfigError if they are not of so many stages.
  void join_to(const std::vector<std::size_t>& parts);

  /// What all stages say of themselves. A plan holds as long as it stays the same.
  std::string state(bool gradients) const;
  /// Throws ConfigError if what the stages were made from has others now.
  void check_current() const;

 private:
  struct Link {
    std::string name;
    Stage stage;
    State state;
    Modules modules = {};
    std::size_t parts = 1;
  };
  std::vector<Link> links_;
  std::function<void()> check_;
};

/// The State of a stage that is a module: which modules it has, whether they train, and of their parameters
/// and buffers shapes, dtypes, devices and what requires a gradient.
REEF_API std::string chain_state_of(const std::shared_ptr<torch::nn::Module>& module, bool gradients);

struct ChainProfileOptions {
  /// Each time is the median of so many, after one that is not counted.
  int repeats = 3;
};

/// Measures each stage by itself, on `input` and what follows from it: bytes by the ledger, seconds by the
/// clock, of forward passes with and without a tape and of the backward pass. Needs the largest stage's
/// memory, not the chain's. Parameters, their gradients, buffers and generators are afterwards what they
/// were; no hook of a parameter runs. Gradients that do not exist yet are counted as made by the first
/// backward pass, and kept.
///
/// A stage that writes into its input, or gives back a part of it, is joined to the one before. Throws
/// ConfigError if the chain is empty, if its first stage writes into its input, if a stage gives an undefined
/// tensor, or in inference mode.
REEF_API ChainProfile profile_chain(Chain& chain, const at::Tensor& input,
                                    const ChainProfileOptions& options = {});

/// chain(input), in whose backward pass stages are run again as `schedule` says: peak and time are those of
/// simulate(). Gradients are bit for bit those of the plain call, see checkpoint(). The schedule must have
/// come from a profile of this chain; throws ConfigError if it is for another number of stages or is not
/// legal. Outside of grad mode it is the plain call.
///
/// `tier`: where what the schedule moves goes; needed if it moves anything. What the program itself still
/// refers to stays in memory. Copies are made beside the stages, by threads or, on a CUDA device, by streams
/// of their own; inside a Budget, which moves memory itself, none are. Throws BudgetError if the tier is
/// full, and what the tier throws; the graph is then as if a stage had thrown.
REEF_API at::Tensor run(const Chain& chain, const Schedule& schedule, const at::Tensor& input,
                        const CheckpointOptions& options = {}, const std::shared_ptr<Tier>& tier = nullptr);

/// What was chosen for a chain, an input and a budget.
struct ChainPlan {
  ChainProfile profile;
  Schedule schedule;
  ScheduleCost cost;
  std::uint64_t budget_bytes = 0;
  std::uint64_t natural_peak_bytes = 0;
  bool is_priced = false;  ///< its profile is an upper bound, from inputs of other sizes

  /// "24 stages within 200 MiB: peak 199 MiB of 410 MiB, 9.1 % more time", and what moves to a tier
  REEF_API std::string text() const;
};

struct PlannedChainOptions {
  ChainSolverOptions solver = {};
  ChainProfileOptions profile = {};
  CheckpointOptions checkpoint = {};
  /// Or none. Outputs and tapes may also be moved there, where that is faster than computing them once more.
  std::shared_ptr<Tier> tier = {};
  /// 0 bytes a second: measured when a chain is profiled, with as much as the largest tape, 16 MiB at most.
  TierSpeed tier_speed = {};
  /// Whether inputs whose sizes are near or between those of inputs that have been profiled may be planned
  /// for without a profile of their own, by an upper bound of their bytes. It holds where bytes grow with
  /// each size like sums or maxima of its powers of up to 2.
  bool price_sizes = true;
};

/// A chain that is profiled and planned for when it meets an input of another shape, dtype or device, and
/// when its stages are no longer what they were (see Chain::state): a layer replaced, added, frozen or
/// unfrozen, one that trains or no longer does. Inputs of sizes near or between those that it has met are not
/// profiled but priced; if a run has needed more than it was given, a warning says so, and from then on each
/// size is profiled. 64 kinds of stages and inputs are kept, with 64 profiles of each. Thread-safe.
class REEF_API PlannedChain {
 public:
  explicit PlannedChain(Chain chain, const PlannedChainOptions& options = {});
  /// Where ranks train together, and must use what is sharded in the same order: all take rank 0's profile,
  /// and meet new kinds of input alike.
  PlannedChain(Chain chain, const ProcessGroupPtr& group, const PlannedChainOptions& options = {});
  ~PlannedChain();
  PlannedChain(PlannedChain&&) noexcept;
  PlannedChain& operator=(PlannedChain&&) noexcept;
  PlannedChain(const PlannedChain&) = delete;
  PlannedChain& operator=(const PlannedChain&) = delete;

  /// The chain's output, whose forward and backward pass need at most `budget_bytes` besides what is there
  /// before, gradients of parameters included where there were none, and are as fast as a schedule for that
  /// makes them. Throws BudgetError, with the smallest budget that would do, and as profile_chain() does.
  at::Tensor operator()(const at::Tensor& input, std::int64_t budget_bytes);
  /// The same of `now`, whose stages need not be those that it was called with before.
  at::Tensor operator()(const Chain& now, const at::Tensor& input, std::int64_t budget_bytes);

  /// What that has chosen, or chooses now, for such an input.
  ChainPlan plan(const at::Tensor& input, std::int64_t budget_bytes);
  ChainPlan plan(const Chain& now, const at::Tensor& input, std::int64_t budget_bytes);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// modules->forward(input) as a PlannedChain of the layers that there are now. The first call with such an
/// input and such layers profiles the chain, which takes the time of some steps; what it finds is kept as
/// long as the modules live.
REEF_API at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, const at::Tensor& input,
                                          std::int64_t budget_bytes, const PlannedChainOptions& options = {});
REEF_API at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, const at::Tensor& input,
                                          std::int64_t budget_bytes, const ProcessGroupPtr& group,
                                          const PlannedChainOptions& options = {});

/// What checkpoint_sequential() has chosen, or chooses now, for the same arguments.
REEF_API ChainPlan plan_of(const torch::nn::Sequential& modules, const at::Tensor& input,
                           std::int64_t budget_bytes, const PlannedChainOptions& options = {});
REEF_API ChainPlan plan_of(const torch::nn::Sequential& modules, const at::Tensor& input,
                           std::int64_t budget_bytes, const ProcessGroupPtr& group,
                           const PlannedChainOptions& options = {});

}  // namespace reef
