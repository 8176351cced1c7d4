#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// Returns a function that gives a batch's micro-batches, which is cut along dimension 0 when the first of
/// them is wanted: on ranks that have the first stage, in the run, so that what is wrong with the batch fails
/// the run. The function throws ConfigError if tensors differ in their rows, or have too few.
std::function<PipelineStage::Tensors(std::uint32_t)> cut_into_micro_batches(
    const PipelineStage::Tensors& batch, std::uint32_t count);

/// Returns the same for a sequence of batches, whose micro-batches are numbered on. `batch_of` is called when
/// the first micro-batch of a batch is wanted.
std::function<PipelineStage::Tensors(std::uint32_t)> cut_each_batch(
    std::function<PipelineStage::Tensors(std::uint32_t batch)> batch_of, std::uint32_t count);

/// The losses of a replica's micro-batches, as far as a rank has any, as text for the other ranks. Of each
/// batch the replica has `count` micro-batches; they are numbered on, after those of the replicas before it.
std::string text_of_losses(const std::vector<at::Tensor>& losses, std::uint32_t count, std::uint32_t replica,
                           std::uint32_t replicas);

/// Adds up the losses of all ranks, which are given as such texts, in the order of micro-batches, for each
/// batch. `count`: micro-batches of a batch, of all replicas.
std::vector<at::Tensor> sums_of_losses(const std::vector<std::string>& texts, std::uint32_t count);

}  // namespace reef
