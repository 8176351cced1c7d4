#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/segments.h"
#include "reef/shard.h"
#include "shard/sums_when_asked.h"

namespace reef {

/// The parameters of this rank's chunks, and their gradients. Where other ranks have the same chunks, as
/// replicas or in the other direction, or where something is divided, kept in other precision or elsewhere,
/// each segment is a Shard, which reduces gradients when a call has succeeded on all ranks.
class PipelineParameters {
 public:
  using Named = Shard::Named;
  struct OfChunk {
    Named parameters, buffers;
  };

  /// `options` say everything but how gradients are added up: as sums. `in_one_order`: ranks of a segment use
  /// its parameters in the same order. All ranks call it alike. Throws
  /// ConfigError on every rank if one of them cannot shard its chunks, and RankFailed.
  PipelineParameters(const std::vector<PipelineSegment>& segments,
                     const std::map<std::uint32_t, OfChunk>& own, const ProcessGroupPtr& group,
                     ShardOptions options, bool in_one_order);

  /// What optimizers step: see Shard::parameters().
  const Named& stepped() const { return stepped_; }

  /// See Pipeline.
  double clip_grad_norm_(double max_norm);
  void clear_gradients();

  /// Makes ranks settle what steps have made of the parameters. All ranks alike, before each call.
  void use();
  /// Throws ConfigError if this rank's gradients cannot be reduced.
  void check() const;
  /// To be called while this rank waits for others: they may gather what it has a part of. Empty: never.
  std::function<void()> while_waiting();
  /// This rank has failed in a call; and some rank has, of which all ranks have heard.
  void tell_failed();
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
    std::vector<std::int64_t> ranks;
    Named parameters, buffers;
    std::optional<Shard> shard = {};
    std::optional<SumsWhenAsked> sums = {};  ///< of a shard that trains something
  };
  void shard(Segment& segment, const ProcessGroupPtr& ranks, const ShardOptions& options,
             bool in_one_order) const;

  ProcessGroupPtr group_;
  std::deque<Segment> segments_;  ///< this rank's
  Named stepped_;
};

}  // namespace reef
