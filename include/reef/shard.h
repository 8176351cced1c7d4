#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reef/collectives.h"
#include "reef/compression.h"
#include "reef/export.h"
#include "reef/nonfinite_gradients.h"
#include "reef/optimizer_state.h"
#include "reef/price_exchange.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace reef {

class LocalUpdates;   // local_updates.h
class PreparedLoad;   // of pipelines
class SumsWhenAsked;  // of pipelines
class UpdateBeside;   // delayed_update.h

/// What is divided among the ranks (ZeRO, 1910.02054). The results are the same, bit for bit.
enum class Stage : std::uint8_t {
  kReplicate,   ///< nothing: every rank has all of it (DDP)
  kOptimizer,   ///< states of the optimizer (ZeRO-1)
  kGradients,   ///< and gradients (ZeRO-2)
  kParameters,  ///< and parameters (ZeRO-3)
};

/// What becomes of a module's buffers (running statistics) when gradients have been reduced.
enum class Buffers : std::uint8_t {
  kLocal,      ///< nothing: each rank has its own
  kBroadcast,  ///< they become rank 0's
  kMean,       ///< the mean over the ranks, if they are floating-point numbers; else rank 0's
};

/// Parameters that are computed with in 16 bits, and kept and stepped in float32 (1710.03740, section 3.1).
struct MixedPrecision {
  /// What float32 parameters of the module become, frozen ones too: at::kBFloat16 or at::kHalf. Inputs and
  /// buffers are left to the program. What frozen ones were is kept, divided as the stage divides parts.
  at::ScalarType parameters = at::kBFloat16;
  /// In what gradients are added up, over passes and over ranks, and travel: at::kFloat, or what the
  /// parameter is, which sends half the bytes and rounds after each addition.
  at::ScalarType sums = at::kFloat;
};

struct ShardOptions {
  Stage stage = Stage::kReplicate;
  /// Gradients travel in flat memory of so many bytes (one parameter more, if that is larger).
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  /// What a step sees of the gradients of all ranks.
  Reduction reduction = Reduction::kMean;
  /// kNative gives up what kRanks promises: stages, numbers of ranks and one process that accumulates are
  /// alike within rounding then, and no longer bit for bit (the ranks among themselves are). It is for
  /// devices, where kRanks needs a bucket more for what it receives, and NCCL's sums may be faster; over gloo
  /// it sends gradients twice above kReplicate. Not with shard_degree.
  SumOrder sum_order = SumOrder::kRanks;
  /// Gives up what kRanks promises, too: ranks are alike, bit for bit, and their number makes a difference.
  /// With copies (shard_degree) only what leaves a copy is compressed. What is held back is in the
  /// optimizer's state dicts (OptimizerState::communication), and takes the bytes of the gradients. Not with
  /// kNative, nor for parameters of Half, whose loss is scaled: a scale that changes would scale what is held
  /// back.
  Compression compression = Compression::kNone;
  CompressionOptions compression_options = {};
  /// kAuto: of which classes a method may be; if there are none, of all but kLossy. shard() measures the link
  /// (measure_link: some 24 MiB that a rank sends) and the work, prices an exchange of these parameters by
  /// each method, and takes the fastest, the same on all ranks: see Shard::compression(). Not where sets of
  /// ranks have copies, and for parameters on the CPU whose gradients are float32.
  std::vector<ExchangeClass> allow = {};
  /// kParameters: up to so many bytes of gathered parameters stay in memory, those that are used next. Fewer
  /// are made what operators need at once, and one bucket on its way. With room for all of them a step sends
  /// what the other stages send. If it is not given: what a Budget for their device leaves free on every rank
  /// in a step that evicts nothing, but for one bucket, from the third step on; 0 where no rank has one.
  std::optional<std::int64_t> resident_bytes = {};
  /// Above kReplicate: among how many ranks, which follow each other, what is divided is divided; 0: among
  /// all of the group. Each such set has a copy of all of it (hybrid sharding, HSDP; MiCS, 2205.00119), and
  /// parameters are gathered within it; of gradients only what has been added up leaves it, one slice to the
  /// next copy and one back, and the order of additions is that of ranks, as ever. Divides the group's size.
  int shard_degree = 0;
  Buffers buffers = Buffers::kLocal;
  /// Parameters of the module that are each rank's own business: not made alike, not reduced, and none of
  /// parameters(); give them to an optimizer of their own. Of a full state dict they are rank 0's.
  std::vector<at::Tensor> ignored = {};
  /// Parameters of 16 bits, those that were so before and those that become so, have float32 masters: what
  /// parameters() gives at every stage, with the values from before. The module's parameters are the masters
  /// rounded, the gradients of the masters are float32. Bytes of P parameters beside what is divided: 2 P.
  std::optional<MixedPrecision> mixed_precision = {};
  /// parameters() are copies in host memory, page-locked where the module is on a CUDA device, so the
  /// optimizer and its states are there, too (ZeRO-Offload, 2101.06840): a bucket's gradients go there when
  /// they have been reduced, and what the step has made of the copies comes back when an operator first reads
  /// a parameter. At every stage, on one rank as well, and with the same bits but for the device's own step.
  bool offload = false;
};

/// Tensors by name, in the module's order. torch::pickle_save() makes of it what Python's torch.load reads.
using StateDict = c10::Dict<std::string, at::Tensor>;

/// What the ranks of a group keep of one module, and what they do for it: see shard().
class REEF_API Shard {
  struct Parts;

 public:
  /// Tensors by name: parameters (leaves; the same tensor twice is one parameter) and buffers.
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  /// How a module is looked at when it may have changed: each may be empty.
  struct ModuleNow {
    /// Throws ConfigError if the module's parameters are not those that it had.
    std::function<void()> check_parameters;
    /// What it has now (a program may assign others); nothing, if the module is gone.
    std::function<std::optional<Named>()> buffers;
  };
  Shard(const Named& parameters, const Named& buffers, ProcessGroupPtr group, const ShardOptions& options,
        ModuleNow module_now = {});
  /// Parameters stay as they are and whole, on every rank: after kParameters if they have been gathered. The
  /// last gather must be over; see gather().
  ~Shard();
  Shard(Shard&&) noexcept;
  Shard& operator=(Shard&&) noexcept;
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  /// What this rank's optimizer steps. kReplicate: the module's parameters that require a gradient, in order,
  /// or, with MixedPrecision or offload, masters of them. Else this rank's part of each of them (see part.h),
  /// in memory of its own: as many, and in as many dimensions, on every rank, all dimensions but the last
  /// being 1, and without elements where other ranks keep all of it. whole_shape_of() says the parameter's
  /// shape. Gradients appear here when backward is over, and the module's parameters have stand-ins for them,
  /// which nobody can read: clearing one clears the gradients of its parts. The first element of a part is a
  /// multiple of kShardAlignment elements into its parameter.
  const std::vector<at::Tensor>& parameters() const;
  /// Of each of these, the module's name for it; of a part: name[first:last].
  const std::vector<std::string>& names() const;

  /// Of an optimizer: parameters(), as many of them, to which a rule has given the same key.
  struct ParameterGroup {
    std::string key;
    std::vector<at::Tensor> parameters;
  };
  /// Called with a parameter's name in the module and its whole shape.
  using GroupRule = std::function<std::string(const std::string& name, at::IntArrayRef whole_shape)>;
  /// parameters() in groups, in the order in which their keys first come: the same groups on every rank, and
  /// those of one process. All ranks call this alike. Throws ConfigError on all if the rule gives a parameter
  /// different keys on them, or throws on one.
  std::vector<ParameterGroup> param_groups(const GroupRule& rule) const;

  /// While one lives, backward adds gradients up on this rank and sends nothing. All ranks do so alike.
  class REEF_API NoSync {
   public:
    explicit NoSync(Shard& shard);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Parts& parts_;
  };

  /// While one lives, a pass of backward gives parameters() this rank's own sums, which a step uses, and
  /// sends nothing, not a byte: parameters are each rank's own from then on (local SGD), until
  /// average_parameters(). A rank may take other steps than others. Buffers stay each rank's, too. All ranks
  /// begin and end it alike. Throws ConfigError where parameters are divided.
  class REEF_API LocalSums {
   public:
    explicit LocalSums(Shard& shard);
    ~LocalSums();
    LocalSums(const LocalSums&) = delete;
    LocalSums& operator=(const LocalSums&) = delete;

   private:
    Parts& parts_;
  };

  /// For ranks that have different numbers of batches: each calls it when it has no more. Until none has any,
  /// it takes part in the passes of the others, as if with a batch whose gradients are zero, and calls `step`
  /// after each, which does what the others do after theirs: steps the optimizer, clips by the norm of the
  /// group, changes the learning rate. So the step is, bit for bit, that of one process that accumulates over
  /// the batches that there are and divides, for Reduction::kMean, by the number of ranks. The others take
  /// one step after each pass; their passes in NoSync are no business of this one's, but at kParameters,
  /// where it throws RanksOutOfStep. A pass that is abandoned is passed over. Gradients are cleared before
  /// each pass. A rank sends what it would with a batch, and a last pass's worth when all have ended. Throws
  /// ConfigError in NoSync, in LocalSums and beside a DelayedUpdate, and what `step` throws.
  void join(const std::function<void()>& step);

  /// Each of parameters() becomes its mean over the ranks: added up in the order of ranks and in its dtype,
  /// then divided; and buffers become what ShardOptions::buffers says. Gradients, states of the optimizer and
  /// what is held back stay each rank's. A rank sends what a step would. Memory: a bucket. All ranks call it
  /// alike. Throws ConfigError on all where parameters are divided, and RankFailed.
  void average_parameters();

  /// Makes the module's parameters what the ranks' optimizers have made of their parts. Happens by itself
  /// when an operator first reads a parameter after a step, so all ranks must do that or this alike. Throws
  /// RankFailed. kParameters: all of them are in memory then, until operators need others.
  void gather();

  /// Takes up what has become of the module since shard(): parameters that are new, gone, frozen or not, in
  /// other memory or of another dtype, other buffers. As if the module were sharded anew, but masters keep
  /// their bits, and gradients that are held back (ShardOptions::compression) stay so; parameters() are new
  /// tensors, so make the optimizer anew. Memory meanwhile, where there are masters: two copies of a full
  /// state dict; with a compression, what all ranks hold back. All ranks alike. Throws as shard() does, and
  /// then the module is whole and no longer sharded, and ConfigError beside a DelayedUpdate, in no_sync or in
  /// LocalSums.
  void refresh(torch::nn::Module& module);
  void refresh(const Named& parameters, const Named& buffers, ModuleNow module_now = {});
  /// A refresh() has thrown when the old shard was gone, or this was moved from: nothing else may be called.
  bool has_ended() const { return parts_ == nullptr; }

  /// States of the module and of the optimizer that steps parameters(): whole, as one process would have
  /// them, or what this rank keeps of them. Either is loaded at any stage, by any number of ranks, from any
  /// number of files, bit for bit. All ranks call these alike, but for the sharded ones. What is wrong on one
  /// rank (memory that runs out, too) is thrown on all: there as it was, on the others as ConfigError, which
  /// says which rank it is and why; nothing has changed then. They throw RankFailed.

  /// Copies on the CPU, under every name, which a budget does not move. rank0_only: an empty one on other
  /// ranks. A rank sends what it keeps to each other rank; memory beside what is returned: two buckets.
  StateDict full_state_dict(bool rank0_only = false);
  /// parameters() by names() (masters, if there are any), and what all ranks have: frozen parameters and
  /// buffers. Shares their memory. With MixedPrecision, of frozen ones this rank's part of what they were.
  StateDict sharded_state_dict() const;
  /// Of one full state dict, or of the sharded ones of all ranks of the run that saved them. If any rank
  /// gives none, or empty ones, all are given what rank 0 has. Nothing may be missing, or be there besides.
  void load_state_dict(const std::vector<StateDict>& given);

  /// What an optimizer over the whole parameters would keep, which it can load: states that are by element
  /// are put together, codes of few bits, too, and parameters of a group are in the module's order. Refused:
  /// states that are not by element, and optimizers whose classes, groups or options differ between ranks.
  OptimizerState full_optimizer_state(const torch::optim::Optimizer& optimizer, bool rank0_only = false);
  OptimizerState sharded_optimizer_state(const torch::optim::Optimizer& optimizer) const;
  /// As load_state_dict(). What does not name its parameters (a file of torch::optim) has those that require
  /// a gradient, in the module's order. Refused: what another rule keeps, with what is missing. Gradients
  /// that are held back (ShardOptions::compression) are loaded with it, by any number of ranks: where these
  /// are fewer, they add up what others held back. A state that has none begins with none held back; refused:
  /// one of another compression, or not of all ranks.
  void load_optimizer_state(torch::optim::Optimizer& optimizer, std::vector<OptimizerState> given);
  /// The same of optimizers that are not LibTorch's. `own` names parts; to load, it needs no states, and of
  /// options the keys alone, and what is returned has its ids. `rule`: its class, as "torch.optim.AdamW", of
  /// which what it keeps is known; else only options are compared.
  OptimizerState full_optimizer_state(const OptimizerState& own, bool rank0_only = false);
  OptimizerState own_optimizer_state(const OptimizerState& own, std::vector<OptimizerState> given,
                                     const std::string& rule = "");

  /// What this rank's exchange of gradients remembers (ShardOptions::compression), which the optimizer's
  /// states above have besides; the tensors are nobody's to write to. load: in its place, what
  /// own_optimizer_state() gives for this rank, once that optimizer has loaded the rest.
  OptimizerState::Communication communication() const;
  void load_communication(const OptimizerState::Communication& own);

  /// Whose gradients were not finite in the last pass that was reduced, by parameter, in the module's order
  /// and that of ranks; the same on all ranks, and empty if all were finite. Such a pass is void: all its
  /// gradients are NaN, on all ranks, and what is held back (ShardOptions::compression) is, bit for bit, what
  /// it was before. So leave the step out (GradScaler does, and optimizers of reef::optim throw
  /// NonFiniteGradient), clear the gradients, and go on with the next batch. Throws ConfigError without a
  /// compression, where gradients arrive as they are: look at these.
  const std::vector<NonFiniteElements>& nonfinite_gradients() const;

  /// Clears the gradients of parts whose parameters' gradients were cleared (module.zero_grad()), which the
  /// next backward does by itself: to be called where a step comes before that. Python's optimizers do.
  void clear_gradients();

  /// For what a program does on all ranks alike: throws ConfigError on all if any says that it has `failed`
  /// (empty: it has not), but on those that have; or if they do not give the same optimizer's `rule`.
  void agree_with_ranks(const std::string& failed, const std::string& rule = "") const;

  /// kParameters: how many bytes of gathered parameters may stay now; the same on all ranks.
  std::int64_t resident_bytes() const;
  /// How gradients travel: what was given, or what kAuto has chosen, and by which prices; nothing, if it was
  /// given, or there is one rank. refresh() leaves it as it is.
  Compression compression() const;
  const std::optional<ExchangePrices>& compression_prices() const;
  /// Bytes that this rank has sent for gradients and parameters.
  std::int64_t sent_bytes() const;

 private:
  friend class LocalUpdates;
  friend class PreparedLoad;
  friend class SumsWhenAsked;
  friend class UpdateBeside;
  std::unique_ptr<Parts> parts_;
};

/// Trains an unmodified module on all ranks of a group: makes it what it is on rank 0, parameters and
/// buffers, and from now on reduces its gradients during backward, overlapped. Gradients are added up in the
/// order of ranks, so with the same micro-batches a step is bit for bit that of one process that accumulates
/// over them (and divides by their number, for Reduction::kMean), at every stage and for every optimizer that
/// treats elements one by one.
///
///     auto group = reef::init_process_group();
///     auto sharded = reef::shard(*model, group, {.stage = reef::Stage::kOptimizer});
///     torch::optim::AdamW optimizer(sharded.parameters(), 1e-3);
///     // and the training loop as it was
///
/// The module stays what it is: parameters that are replaced, added, unfrozen or given other memory
/// (torch::load into the module) are refused with ConfigError at the end of the next pass that is reduced,
/// and by gather() and the state dicts; refresh() takes such a change up. Buffers may be replaced.
///
/// Where parts have gradients in their place, gradients that the parameters have when this is called are
/// dropped. Parameters that a backward pass did not reach on any rank have no gradient after it; what some
/// rank reached counts as zero on the others. A pass that fails on one rank throws PassAbandoned on the
/// others, and one that a rank does not come to, since it has gone on to something else, RanksOutOfStep on
/// all that wait. The group must outlive what is returned, the module need not. Throws ConfigError on every
/// rank if the ranks' modules differ (with the first difference), for sparse or non-dense parameters, those
/// that another Shard has, those that would no longer share memory with another parameter or a buffer, and
/// ignored ones that are none, and RankFailed.
REEF_API Shard shard(torch::nn::Module& module, const ProcessGroupPtr& group,
                     const ShardOptions& options = {});

}  // namespace reef
