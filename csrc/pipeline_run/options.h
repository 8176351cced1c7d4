#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// What a pipeline is to run, and whether it can, before it is made.

/// Throws ConfigError, on every rank, if there is no group or it has no gloo for the CPU.
void check_group(const ProcessGroupPtr& group);

/// Throws ConfigError unless the options say what to run on so many ranks.
void check_options(const PipelineOptions& options, std::uint32_t ranks);
/// Returns the options that must be the same on all ranks, in lines.
std::string facts_of(const PipelineOptions& options);

/// Returns the schedule of a replica. Throws ConfigError unless the executor can run it on so many ranks.
PipelineSchedule schedule_of(const PipelineOptions& options, std::uint32_t ranks);

/// Returns the schedule by which Pipeline::train() runs so many batches: with an update of each chunk, and
/// without a barrier between batches. `of_a_batch`: what schedule_of() gave. `before`: how many batches it
/// has trained on before. Throws ConfigError if it cannot.
PipelineSchedule training_schedule(const PipelineOptions& options, const PipelineSchedule& of_a_batch,
                                   std::uint32_t batches, std::uint64_t before);
/// Throws ConfigError unless a call of train() can have so many batches.
void check_batches(std::uint32_t batches, std::uint32_t micro_batches_of_batch);
/// The number of micro-batches of a batch.
std::uint32_t micro_batches_of_batch(const PipelineSchedule& of_a_batch);

/// Returns the cuts of each replica: those that are given, or those into chunks of as many stages each.
/// Throws ConfigError if they do not make so many chunks.
std::vector<PipelineCuts> cuts_of_replicas(const PipelineOptions& options, std::size_t stages,
                                           std::uint32_t chunks);

/// Returns what the options have led to, in lines.
std::string facts_of(const PipelineSchedule& schedule, const std::vector<PipelineCuts>& cuts,
                     std::size_t stages);

/// Throws ConfigError on every rank if one has found something `wrong`, or if ranks' facts differ.
void agree_on_pipeline(const ProcessGroupPtr& group, const std::string& wrong, const std::string& facts);

}  // namespace reef
