#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reef/collectives.h"
#include "reef/export.h"
#include "reef/pipeline_partition.h"
#include "reef/pipeline_schedule.h"
#include "reef/shard.h"

namespace torch::nn {
class Sequential;
}  // namespace torch::nn

namespace reef {

class Chain;

/// A stage of a model that is a chain of stages.
struct PipelineStage {
  using Tensors = std::vector<at::Tensor>;
  /// Computes the stage's outputs, any number of tensors of any dtypes, from those of the stage before. Some
  /// may be undefined. It may modify its inputs in place.
  std::function<Tensors(const Tensors& inputs)> run;
  /// The stage's parameters, with their names in the whole model.
  std::vector<std::pair<std::string, at::Tensor>> parameters = {};
  /// Gives its buffers (running statistics) as they are now, with their names. Empty: it has none.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> buffers = {};
  /// Skips: names of the tensors that it gives to stages behind it besides its outputs, and of those that it
  /// takes besides its inputs. They come last in what `run` returns, and in what it is given, in these
  /// orders. One stage gives a name, and any later ones take an alias of the tensor (at::alias), which is
  /// sent straight to each chunk that needs it, and must not be modified in place.
  std::vector<std::string> gives = {}, takes = {};
};

/// For what a pipeline plans its schedule and cuts by itself.
struct PipelineSample {
  /// A micro-batch like those of training. That of rank 0 is used; the others give as many tensors, which may
  /// be undefined.
  std::vector<at::Tensor> micro_batch;
  /// What this rank may hold at most; 0 stands for any number.
  std::uint64_t rank_bytes = 0;
  /// How many bytes an optimizer keeps for each byte of a parameter that is trained: 2 for AdamW.
  double state_bytes_per_byte = 2;
  /// Lets the plan give a chunk to several ranks (PipelinePlanOptions::may_replicate).
  bool may_replicate = false;
  /// As in MeasurePipelineOptions.
  std::function<at::Tensor(const std::vector<at::Tensor>& outputs)> loss = {};
};

struct PipelineOptions {
  /// Into how many micro-batches a batch is cut, along dimension 0: the first ones are one row longer where
  /// it does not divide.
  std::uint32_t micro_batches = 1;
  /// A name of the table of schedules (pipeline_generator.h). With an asynchronous one, train() updates
  /// weights after each batch, and step() is refused. Empty: what is planned for the sample, or, without one,
  /// "1f1b".
  std::string schedule = {};
  /// With it the schedule, its depth and the cuts are planned: measure_pipeline() measures stages, ranks and
  /// links when the pipeline is made, and plan_pipeline() takes the fastest that fits into each rank's bytes,
  /// or, where `schedule` names one (also an asynchronous one), the fastest of that name. Of replicas the
  /// first is measured. Throws what these throw, and ConfigError beside chunks_per_rank, hops,
  /// ranks_per_chunk, actions, cuts and recomputed.
  std::optional<PipelineSample> sample = {};
  std::uint32_t chunks_per_rank = 0;                ///< as in PipelineShape
  std::vector<std::uint32_t> hops = {};             ///< as in PipelineShape
  std::vector<std::uint32_t> ranks_per_chunk = {};  ///< as in PipelineShape
  /// A schedule of your own, or of a plan, in place of all these.
  std::optional<PipelineSchedule> actions = {};
  /// Empty: each chunk has as many stages as the others, the first ones one more where they do not divide.
  PipelineCuts cuts = {};
  /// The number of copies of the pipeline that train together, each on batches of its own (data parallel).
  /// The group has `replicas` times as many ranks as the schedule. Ranks with chunks of the same numbers
  /// follow each other: rank s of replica r is rank s * replicas + r of the group.
  std::uint32_t replicas = 1;
  /// The cuts of each replica, where they differ because replicas' ranks do: HetPipe's virtual workers, say.
  /// ConfigError together with `cuts` or a sample.
  std::vector<PipelineCuts> replica_cuts = {};
  /// The options with which ranks that have the same stages shard them: the replicas, the two directions of
  /// chimera and dualpipe, and the ranks of a chunk. With one replica they choose mixed precision and
  /// offload. ConfigError for reduction, ignored and compression, which a pipeline does not support here.
  ShardOptions shard = {};
  /// Keeps only the inputs of a chunk for its backward pass, and recomputes the rest, as reef::checkpoint()
  /// does. The stages must compute the same again. Gradients are bit for bit the same. With a sample, the
  /// plan decides which stages are recomputed: as few as make the fastest schedule fit.
  bool recompute = false;
  /// Recomputes only these runs of stages, each by itself, and those within others once more when these are
  /// recomputed. ConfigError together with `recompute` or a sample, and for runs that are not ascending,
  /// overlap otherwise or are not within the model.
  RecomputedRuns recomputed = {};
  /// Tied weights: each list has all names of one parameter. It is needed where makers make the stages. Where
  /// stages are given, the parameters that they share are found.
  std::vector<std::vector<std::string>> tied = {};
  /// "hetpipe", whose replicas are virtual workers, and whose waves are batches (2005.14038): each worker
  /// updates its own weights by an optimizer of its own. When it has trained on a batch, its weights become
  /// the sum of what all workers' batches have changed, up to so many batches before (D), and of its own
  /// later ones; after the last batch of a call, of all. So 0 waits for all workers after each batch, and 1
  /// lets each be one batch ahead of the slowest. Gradients are of single micro-batches, whatever `reduction`
  /// says. Bytes: two copies of the weights, and for each of staleness + 1 batches one of each worker's, in
  /// the host's memory.
  std::uint32_t staleness = 0;
  /// Asynchronous schedules, but for "pipedream_2bw" and "hetpipe": how many batches train() takes by "1f1b"
  /// at first, over all of its calls (PipeMare's technique 3, 1910.05124, section 3.3).
  std::uint32_t synchronous_batches = 0;
  /// "pipemare": above 0, backward passes use w - delay * d instead of the newest weights w, where d follows
  /// their changes: d = g d + (1 - g) (w after - w before an update), with g = correction_decay ^ (1 / delay)
  /// and the chunk's pipeline_delays() (technique 2, section 3.2, which has exp(-2) for it). d is 0 when
  /// train() is called. Costs a rank two more copies of its trained weights.
  double correction_decay = 0;
  /// kMean divides gradients by the number of micro-batches of all replicas when all of them are added up;
  /// kSum does not.
  Reduction reduction = Reduction::kMean;
  /// What random numbers in the stages depend on, together with the numbers of the call, the micro-batch and
  /// the stage, and nothing else: so dropout is bit for bit the same wherever the model is cut.
  std::uint64_t seed = 0;
};

/// A model that is cut over the ranks of a group, trained and run in micro-batches as a schedule says.
///
///     auto group = reef::init_process_group();
///     reef::Pipeline pipeline(model, group, {.micro_batches = 16});
///     torch::optim::AdamW optimizer(pipeline.parameters(), 1e-3);
///     auto loss = pipeline.step(batch, [&](const at::Tensor& output, std::uint32_t micro_batch) {
///       return torch::nll_loss(output, targets[micro_batch]);
///     });
///     optimizer.step();
///
/// Gradients are bit for bit those of one process that runs forward and backward for one micro-batch after
/// another and adds the gradients up, for each rank that has the stage those of its micro-batches, then adds
/// these sums up in the order of replicas, and for each of them in the order of its ranks, and divides the
/// result. Each rank that has a tied weight adds up its own gradients of it in the order of its passes; these
/// sums are added up likewise. All ranks make the same calls in the same order. Messages say what they hold,
/// so shapes may change from call to call; they travel by gloo, by way of the host's memory where stages are
/// on a device. Not thread-safe; the group must outlive it.
class REEF_API Pipeline {
 public:
  using Tensors = PipelineStage::Tensors;
  using Maker = std::function<PipelineStage()>;
  /// The loss of a micro-batch, a single number, from the last stage's outputs. Called on ranks that have the
  /// last chunk only.
  using Loss = std::function<at::Tensor(const at::Tensor& output, std::uint32_t micro_batch)>;
  using LossOfList = std::function<at::Tensor(const Tensors& outputs, std::uint32_t micro_batch)>;

  /// A stage for each module; this rank keeps those of its own chunks only, and shares them. Throws
  /// ConfigError on every rank if the ranks' options or numbers of stages differ, or if the schedule cannot
  /// be run; RankFailed.
  Pipeline(const torch::nn::Sequential& modules, const ProcessGroupPtr& group,
           const PipelineOptions& options = {});
  /// The same of a chain's stages. Throws ConfigError if a stage was added to it without its module.
  Pipeline(const Chain& chain, const ProcessGroupPtr& group, const PipelineOptions& options = {});
  /// The same of stages of any kind.
  Pipeline(const std::vector<PipelineStage>& stages, const ProcessGroupPtr& group,
           const PipelineOptions& options = {});
  /// The same of stages that are made here, each on the rank that has it: the whole model need not fit on one
  /// rank. Throws what a maker throws; the other ranks throw ConfigError with its sentence. Weights that
  /// chunks of different ranks share cannot be noticed here, and would not stay the same: say which
  /// (PipelineOptions::tied).
  Pipeline(const std::vector<Maker>& stages, const ProcessGroupPtr& group,
           const PipelineOptions& options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// What this rank's optimizer steps, and the names in the whole model: the parameters of its chunks or,
  /// where they are sharded, its parts or masters of them (see Shard::parameters()).
  std::vector<at::Tensor> parameters() const;
  const std::vector<std::pair<std::string, at::Tensor>>& named_parameters() const;
  const PipelineSchedule& schedule() const;
  /// The cuts of this rank's replica.
  const PipelineCuts& cuts() const;
  /// What was planned for the sample, and what it is expected to cost: PipelinePlan::text(). Empty without
  /// one.
  const std::string& plan() const;

  /// Runs forward and backward for all micro-batches, and adds this call's gradients to those that the
  /// parameters have. `batch`, of each replica its own, counts on the ranks that have the first stage; others
  /// may give an undefined tensor. Returns the mean (or sum) of the losses of all replicas in the order of
  /// replicas and micro-batches, on every rank.
  ///
  /// If a stage, the loss or a message fails, its rank throws what failed, and the others PassAbandoned,
  /// which says on which rank, in which chunk and for which micro-batch; gradients are then what they were.
  /// Throws RankFailed if a rank is gone, and RanksOutOfStep.
  /// Bytes: each message lies at the receiver from when it was sent until it is used; where parameters have
  /// gradients already, those of this call are apart from them until it ends.
  at::Tensor step(const at::Tensor& batch, const Loss& loss);
  at::Tensor step(const Tensors& batch, const LossOfList& loss);

  /// A batch, of the rank that has the first stage.
  using Batches = std::function<Tensors(std::uint32_t batch)>;
  /// The loss of a micro-batch of a batch, as for step().
  using LossOfBatch =
      std::function<at::Tensor(const Tensors& outputs, std::uint32_t batch, std::uint32_t micro_batch)>;

  /// Trains for so many batches, without waiting between them until all ranks are done with one. `update` is
  /// called on each rank whenever one of its chunks has the gradients of a batch, and makes an optimizer of
  /// parameters() step; only the parameters of that chunk have gradients then, which are freed afterwards.
  /// Returns the loss of each batch, on every rank.
  ///
  /// By a synchronous schedule, parameters are bit for bit those of step() and an update, batch after batch.
  /// An asynchronous one begins a batch before the weights are updated by all earlier ones; passes use the
  /// versions of weights that pipeline_versions(train_schedule(batches)) lists, bit for bit. When the call
  /// ends, all chunks have had the same number of updates, and nothing is in flight.
  ///
  /// Fails as step() does. If chunks have had different numbers of updates then, this and step(), forward()
  /// and generate() throw ConfigError, which says how many, until load_state_dict() has been called. Chunks
  /// that are sharded or share weights, schedules of several directions (chimera, dualpipe, those with
  /// ranks_per_chunk), and replicas that are cut differently and have several chunks on a rank are trained by
  /// step(), batch after batch, with one call of `update` for each. ConfigError on every rank for the first
  /// two by an asynchronous schedule, for an asynchronous one of your own with replicas that are cut
  /// differently, and if ranks do not give the same number of batches. Bytes: each version besides the newest
  /// takes as many as the rank's trained weights. A list of all actions and losses is kept during the call.
  at::Tensor train(std::uint32_t batches, const Batches& batch, const LossOfBatch& loss,
                   const std::function<void()>& update);
  /// What train() runs for so many batches.
  PipelineSchedule train_schedule(std::uint32_t batches) const;
  /// Into how many micro-batches a batch of train() is cut.
  std::uint32_t micro_batches_of_batch() const;

  /// Runs forward only, without a graph. Returns the last stage's output for the whole batch of a replica on
  /// its rank that has the last chunk (the first, in the first direction of the schedule), and an undefined
  /// tensor (no tensors) on the others.
  at::Tensor forward(const at::Tensor& batch);
  Tensors forward(const Tensors& batch);

  /// What follows from a lane's output: the first stage's next inputs, or nothing, which ends the lane.
  /// Called on the rank that has the last chunk; steps are counted from 0.
  using Next = std::function<Tensors(const Tensors& outputs, std::uint32_t lane, std::uint32_t step)>;
  /// Runs forward again and again, without a graph, for as many lanes at once as there are micro-batches:
  /// sequences that are generated, say. Lane i begins with starts[i], and goes on with what `next` gives,
  /// which travels from the last rank to the first, until that is nothing or so many steps are over. While a
  /// lane waits for what follows, ranks compute others: with a lane for each rank, and one more for each hop
  /// of a slow link, none waits. Stages learn by pipeline_micro_batch() for which lane they compute, so that
  /// they can keep what they need from step to step (keys and values of attention). `starts` count on the
  /// rank that has the first chunk, of each replica its own. All ranks call it alike. Throws as forward()
  /// does.
  void generate(const std::vector<Tensors>& starts, std::uint32_t steps, const Next& next);

  /// Scales the gradients of all ranks so that their joint 2-norm is `max_norm` at most, as
  /// reef::clip_grad_norm_ does in one process, with the same bits; returns the norm that they had. All ranks
  /// call it alike. (A norm of parameters() alone would be that of this rank's chunks.)
  double clip_grad_norm_(double max_norm);
  /// As Shard::clear_gradients().
  void clear_gradients();
  /// Bytes that this rank has sent for gradients and parameters, to the other ranks that have its chunks.
  std::int64_t sent_bytes() const;

  /// States of the whole model, and of the optimizers with which each rank steps its parameters(). Full
  /// states are those that one process would have; sharded ones are what this rank keeps. Either is loaded by
  /// a pipeline of any cut, schedule, stage and number of ranks or replicas, by a Shard and by one process,
  /// and theirs here, bit for bit. All ranks call these alike, but for the sharded ones. What is wrong on one
  /// rank is thrown on all: there as it was, on the others as ConfigError; nothing has changed then. They
  /// throw RankFailed.

  /// Copies on the CPU, in the model's order. rank0_only: an empty one on other ranks. Of running statistics
  /// that replicas have each their own, those of the first. Rank 0 receives the others' chunks, one after
  /// another, and passes them on; memory beside what is returned: two ranks' chunks.
  StateDict full_state_dict(bool rank0_only = false);
  /// What this rank keeps: see Shard::sharded_state_dict(). Shares its memory.
  StateDict sharded_state_dict() const;
  /// Of one full state dict, or of the sharded ones of all ranks of the run that saved them. If any rank
  /// gives none, or empty ones, all are given what rank 0 has. Nothing may be missing, or be there besides.
  void load_state_dict(const std::vector<StateDict>& given);

  /// Groups of optimizers are the same on all ranks, in number and options; a group may be empty on some.
  OptimizerState full_optimizer_state(const torch::optim::Optimizer& optimizer, bool rank0_only = false);
  OptimizerState sharded_optimizer_state(const torch::optim::Optimizer& optimizer) const;
  void load_optimizer_state(torch::optim::Optimizer& optimizer, const std::vector<OptimizerState>& given);
  /// The same of optimizers that are not LibTorch's: see Shard.
  OptimizerState full_optimizer_state(const OptimizerState& own, bool rank0_only = false);
  OptimizerState own_optimizer_state(const OptimizerState& own, const std::vector<OptimizerState>& given,
                                     const std::string& rule = "");

  /// As Shard::agree_with_ranks().
  void agree_with_ranks(const std::string& failed, const std::string& rule = "") const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// The micro-batch for which this thread computes a stage of a pipeline, or the lane of generate(); nothing
/// outside of stages.
REEF_API std::optional<std::uint32_t> pipeline_micro_batch();

}  // namespace reef
