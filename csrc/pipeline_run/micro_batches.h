#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reef/pipeline.h"

namespace reef {

/// Returns a function that gives the micro-batches of a sequence of batches, which are numbered on. A batch
/// is cut along dimension 0: on ranks that have the first stage, in the run, so that what is wrong with it
/// fails the run. `batch_of` is called when the first micro-batch of a batch is wanted. The function throws
/// ConfigError if tensors differ in their rows, or have too few.
std::function<PipelineStage::Tensors(std::uint32_t)> cut_each_batch(
    std::function<PipelineStage::Tensors(std::uint32_t batch)> batch_of, std::uint32_t count);

/// The losses of a replica's micro-batches, as far as a rank has any, as text for the other ranks. Of each
/// batch the replica has `count` micro-batches; they are numbered on, after those of the replicas before it.
std::string text_of_losses(const std::vector<at::Tensor>& losses, std::uint32_t count, std::uint32_t replica,
                           std::uint32_t replicas);

/// Adds up the losses of all ranks, which are given as such texts, in the order of micro-batches, for each
/// batch. `count`: micro-batches of a batch, of all replicas.
std::vector<at::Tensor> sums_of_losses(const std::vector<std::string>& texts, std::uint32_t count);

/// Throws ConfigError, which begins with `call`, unless a loss is a single floating-point number.
void check_loss(const at::Tensor& loss, const char* call);

}  // namespace reef
