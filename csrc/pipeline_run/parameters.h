#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clip_grad_norm.h"
#include "pipeline/segments.h"
#include "pipeline_run/state.h"
#include "pipeline_run/tied.h"
#include "reef/shard.h"
#include "shard/sums_when_asked.h"

namespace reef {

/// The parameters of this rank's chunks, and their gradients. A segment becomes a Shard if several ranks have
/// its chunks, or if the options shard them, keep masters or offload. Its gradients are reduced when a call
/// has succeeded on all ranks.
class PipelineParameters {
 public:
  using Named = Shard::Named;
  struct OfStage {
    std::uint32_t number;            ///< of the stage in the model
    std::uint32_t chunk;             ///< of this rank's, which has it
    Named parameters;                ///< under every name
    std::function<Named()> buffers;  ///< may be empty
    Named buffers_now() const { return buffers ? buffers() : Named(); }
  };

  /// `own`: this rank's stages, ascending. `options` say everything but how gradients are added up: as sums.
  /// `in_one_order`: ranks of a segment use its parameters in the same order. All ranks call it alike. Throws
  /// ConfigError on every rank if one of them cannot shard its chunks, and RankFailed.
  PipelineParameters(std::vector<PipelineSegment> segments, std::vector<TiedSegment> tied,
                     std::vector<OfStage> own, ProcessGroupPtr group, const ShardOptions& options,
                     bool in_one_order);

  /// What optimizers step: see Shard::parameters().
  const Named& stepped() const { return stepped_; }

  /// Whether optimizers step the chunks' own parameters, none of them sharded or shared by chunks.
  bool steps_chunks() const;
  /// Adds up the gradients that a chunk's parameters have, over the ranks that have the chunk. Throws
  /// PassAbandoned if one of these abandons it, and RankFailed.
  void reduce(std::uint32_t chunk);
  /// Takes part in that on a rank where a pass has failed.
  void abandon(std::uint32_t chunk, const std::string& why) noexcept;
  /// Parameters of a chunk that are trained, each once, and the group of the ranks that have them.
  struct Shared {
    std::vector<at::Tensor> parameters;
    ProcessGroupPtr ranks;
  };
  /// Returns the parameters that a chunk shares with other ranks, by segment, in the order of segments_of().
  std::vector<Shared> shared(std::uint32_t chunk);

  /// See Pipeline.
  double clip_grad_norm_(double max_norm);
  void clear_gradients();
  void drop_gradients();  ///< lets go of all that there are
  std::int64_t sent_bytes() const;
  StateDict sharded_state_dict() const;
  /// All ranks ask for it first alike: each segment is a Shard from then on.
  PipelineState& state();

  /// Makes ranks settle what steps have made of the parameters. All ranks alike, before each call.
  void use();
  /// Throws ConfigError if this rank's gradients cannot be reduced.
  void check() const;
  /// Returns what this rank must call now and then while it waits for other ranks, since they may gather
  /// parameters of which it has a part. Empty if they never do.
  std::function<void()> while_waiting();
  /// Waits for what this rank has begun to gather, for which other ranks may have to be called as above.
  void settle();
  /// Is called at once on a rank that has failed in a call.
  void tell_failed();
  /// Is called on all ranks when all know that one has failed.
  void leave_out();

  /// The gradients that a call makes, apart from those that there were. All ranks make one alike, and then
  /// either add() or leave it: then gradients are what they were.
  class OfCall {
   public:
    explicit OfCall(PipelineParameters& parameters);
    ~OfCall();
    OfCall(const OfCall&) = delete;
    OfCall& operator=(const OfCall&) = delete;

    /// Reduces the call's gradients, divides them by `divisor`, and adds them to those that there were.
    void add(std::int64_t divisor);

   private:
    using Aside = std::vector<std::pair<at::Tensor, at::Tensor>>;  ///< tensors, and their gradients
    static void set_aside(const at::Tensor& tensor, Aside& to);

    PipelineParameters& parameters_;
    Aside stepped_;  ///< what optimizers step
    Aside modules_;  ///< the modules' own, where others are stepped in their place
  };

 private:
  struct Segment {
    PipelineSegment place;
    bool in_one_order;
    std::vector<OfStage> stages = {};
    ProcessGroupPtr ranks = {};  ///< where there is a shard: the group of those that have it
    std::optional<Shard> shard = {};
    std::optional<SumsWhenAsked> sums = {};  ///< of a shard that trains something

    bool is_here(int rank) const;
    bool has_some_of(std::uint32_t chunk) const;
    Named all_parameters() const;
    Named all_buffers() const;
    /// Gradients of several ranks are to be added up, or given to parts.
    bool reduces() const { return sums && (place.ranks.size() > 1 || sums->has_parts()); }
  };
  /// Returns the segments that have stages of one of this rank's chunks, from the last one on, so that ranks
  /// with different chunks reduce the segments that they share in the same order.
  std::vector<Segment*> segments_of(std::uint32_t chunk);
  static void take_out(const TiedNames& names, std::vector<OfStage>& from, std::vector<OfStage>& to);
  /// Of segments for which `is_wanted` says so.
  void make_shards(const ShardOptions& options, const std::function<bool(const Segment&)>& is_wanted);

  ProcessGroupPtr group_;
  std::deque<Segment> segments_;  ///< of all ranks; others' have nothing but their places
  bool keeps_others_;             ///< all segments are shards from the start, by the options
  Named stepped_;
  ParametersOfOneRank of_one_rank_;  ///< stepped_, if there are other ranks
  std::vector<TiedSegment> tied_;
  StageNames names_;
  std::unique_ptr<PipelineState> state_;
};

}  // namespace reef
