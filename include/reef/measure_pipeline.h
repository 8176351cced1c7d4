#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "reef/export.h"
#include "reef/pipeline.h"
#include "reef/pipeline_partition.h"

namespace reef {

struct MeasurePipelineOptions {
  /// How often each pass is measured, after one that is not counted. The median counts.
  std::uint32_t repeats = 5;
  /// How many bytes an optimizer keeps for each byte of a parameter that requires a gradient: 2 for AdamW.
  double state_bytes_per_byte = 2;
  /// What this rank may hold at most; 0 stands for any number.
  std::uint64_t rank_bytes = 0;
  /// Measures the link of each pair of ranks, one after another, which takes as long as measure_link() for
  /// each. If not, one measurement holds for all.
  bool each_link = true;
  /// A loss like that of training, a single number, from the last stage's outputs: its passes are measured as
  /// part of that stage. It counts on the rank that measures the last stage, which is the last one, or, where
  /// there are fewer stages, that of the same number. Empty: the loss takes no time and keeps nothing.
  std::function<at::Tensor(const std::vector<at::Tensor>& outputs)> loss = {};
};

/// Measures what plan_pipeline() needs: what each stage takes for a micro-batch like this one, in seconds and
/// bytes, how fast the ranks are, and the links between them. The result is the same on all ranks.
///
///     const reef::PipelineProfile profile = reef::measure_pipeline(model, micro_batch, group);
///     const reef::PipelinePlan plan = reef::plan_pipeline(profile, ranks, {.micro_batches = 16});
///     reef::Pipeline pipeline(model, group, {.actions = plan.schedule, .cuts = plan.cuts});
///
/// Stages are run in their order, a share of them on each rank, and one at a time, so nothing else should run
/// meanwhile. Backward passes are measured in halves, I and W. Bytes are counted by a Ledger. Nothing is
/// trained: parameters, gradients, buffers and random numbers are what they were. Speeds are those of
/// products of matrices, one rank after another; ranks that differ by less than a tenth count as alike.
///
/// All ranks call it alike. `micro_batch` counts on rank 0. Throws what a stage throws, on the others
/// PassAbandoned, as Pipeline::forward() does; RankFailed.
REEF_API PipelineProfile measure_pipeline(const torch::nn::Sequential& modules, const at::Tensor& micro_batch,
                                          const ProcessGroupPtr& group,
                                          const MeasurePipelineOptions& options = {});
/// The same of stages of any kind, and of stages that are made here, each on the rank that measures it.
REEF_API PipelineProfile measure_pipeline(const std::vector<PipelineStage>& stages,
                                          const std::vector<at::Tensor>& micro_batch,
                                          const ProcessGroupPtr& group,
                                          const MeasurePipelineOptions& options = {});
REEF_API PipelineProfile measure_pipeline(const std::vector<Pipeline::Maker>& stages,
                                          const std::vector<at::Tensor>& micro_batch,
                                          const ProcessGroupPtr& group,
                                          const MeasurePipelineOptions& options = {});

}  // namespace reef
