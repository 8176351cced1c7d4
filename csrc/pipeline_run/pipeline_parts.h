#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/group_tags.h"
#include "pipeline_run/executor.h"
#include "pipeline_run/parameters.h"
#include "reef/pipeline.h"

namespace reef {

/// What a pipeline consists of on a rank.
struct Pipeline::Parts {
  static std::unique_ptr<Parts> make(const std::vector<Maker>& stages, const ProcessGroupPtr& group,
                                     PipelineOptions options, bool whole);

  ProcessGroupPtr group;
  PipelineOptions options;
  PipelineCuts cuts;
  std::string plan;  ///< for the sample
  GroupTags numbers;
  std::unique_ptr<PipelineExecutor> executor;
  std::optional<PipelineParameters> parameters;
  std::vector<std::pair<std::string, at::Tensor>> used_by_several_chunks;  ///< tied parameters
  std::uint64_t calls = 0;
  std::uint64_t trained_batches = 0;  ///< by train()
  bool runs = false;                  ///< a call is under way
  std::string uneven;                 ///< how many updates chunks have had, if a call has failed between them

  const PipelineSchedule& schedule() const { return executor->training().schedule(); }
  std::uint32_t micro_batches() const { return schedule().micro_batches; }
  /// Of gradients and losses, of a batch of so many micro-batches.
  std::int64_t divisor(std::uint32_t count) const {
    return options.reduction == Reduction::kMean ? std::int64_t{options.replicas} * count : 1;
  }
  /// Whether train() runs step after step: for what cannot be updated chunk by chunk, and where ranks would
  /// wait in the updates of shared segments in different orders.
  bool trains_by_steps() const {
    const bool has_several_chunks = schedule().chunks() > schedule().ranks();
    return schedule().versions.kind == PipelineVersionRule::Kind::kFlush &&
           (schedule().rank_of.size() > 1 || !parameters->steps_chunks() ||
            (has_several_chunks && !options.replica_cuts.empty()));
  }
  /// Throws ConfigError if it is called by what a run calls, when other ranks are elsewhere.
  void note(const std::string& call) const;
  /// Notes a call, and prepares its run.
  PipelineExecutor::Run begin(const char* call);
  /// Pipeline::step(), which `call` names in errors. `batch` is called on ranks that have the first stage.
  at::Tensor step(const char* call, const std::function<Tensors()>& batch, const LossOfList& loss);
  /// Pipeline::train() where trains_by_steps().
  at::Tensor train_by_steps(std::uint32_t batches, const Batches& batch, const LossOfBatch& loss,
                            const std::function<void()>& update);
  /// Calls `when_failed` on all ranks if one has failed, and none is gone.
  std::vector<std::string> run(
      const PipelineExecutor::Run& run, const std::function<void()>& when_failed = [] {});
};

}  // namespace reef
