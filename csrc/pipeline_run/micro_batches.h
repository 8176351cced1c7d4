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

/// The losses of a rank's micro-batches, as far as it has any, as text for the other ranks. `first_number`:
/// of the first one among those of all replicas.
std::string text_of_losses(const std::vector<at::Tensor>& losses, std::uint32_t first_number);

/// Adds up the losses of all ranks, which are given as such texts, in the order of micro-batches.
at::Tensor sum_of_losses(const std::vector<std::string>& texts);

}  // namespace reef
