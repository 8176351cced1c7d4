#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// What random numbers depend on, besides the stage and the micro-batch.
struct PipelineSeed {
  std::uint64_t seed = 0;
  std::uint64_t call = 0;
  std::uint32_t first_micro_batch = 0;  ///< the number of a replica's first one among those of all replicas
  /// After so many micro-batches the next call begins, whose number is one more.
  std::uint32_t micro_batches_per_call = 1;
};

/// Makes pipeline_micro_batch() return this number on this thread while it lives.
class MicroBatchScope {
 public:
  explicit MicroBatchScope(std::uint32_t number);
  ~MicroBatchScope();
  MicroBatchScope(const MicroBatchScope&) = delete;
  MicroBatchScope& operator=(const MicroBatchScope&) = delete;

 private:
  std::optional<std::uint32_t> before_;
};

/// Consecutive stages, of which runs are recomputed, and may have runs within them that are recomputed once
/// more when these are.
class StageRun {
 public:
  using Tensors = PipelineStage::Tensors;
  /// For which pass stages run.
  struct Pass {
    std::vector<c10::Device> devices;  ///< besides the CPU, whose generators are seeded for each stage
    PipelineSeed seed;
    std::uint32_t micro_batch = 0;
  };

  /// `recomputed`: runs of stages of the model, of which those within these stages count. `takes` and
  /// `gives`: the names of skips from and to other chunks.
  StageRun(std::vector<PipelineStage> stages, std::uint32_t first_stage, const RecomputedRuns& recomputed,
           std::vector<std::string> takes, std::vector<std::string> gives);

  const std::vector<PipelineStage>& stages() const;

  /// Runs the stages, each with generators that are seeded for it. `tensors`: the inputs, and behind them
  /// what is taken. Returns the outputs, and behind them what is given. Throws what a stage throws, and
  /// ConfigError if a tensor of a skip is modified in place.
  Tensors operator()(const Pass& pass, Tensors tensors) const;

 private:
  struct Part;
  class Tree;
  std::shared_ptr<const Tree> tree_;  ///< graphs of recomputed runs keep it, too
};

}  // namespace reef
