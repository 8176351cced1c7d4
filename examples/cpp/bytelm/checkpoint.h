#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "model.h"
#include "pipelined.h"
#include "reef/shard.h"

namespace bytelm {

/// What a run needs to go on bit for bit: all that training changes.
struct TrainingState {
  ByteGPT model;
  std::optional<reef::Shard> sharded;  ///< among several ranks
  std::optional<Pipelined> pipelined;  ///< or this; then there is no model
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  torch::Generator batches;  ///< draws the windows of each step
  std::int64_t step = 0;     ///< steps done
};

/// Writes `state` to one file, whole or not at all: what one process would have written. All ranks call it,
/// and rank 0 writes. Throws reef::FileError.
void save_checkpoint(const std::string& path, TrainingState& state, const Options& options);

/// Reads `state` back. Throws reef::FileError if `path` is not a whole checkpoint of this program, and
/// reef::ConfigError if it is of a model or an optimizer other than `options` describe.
void load_checkpoint(const std::string& path, TrainingState& state, const Options& options,
                     torch::Device device);

}  // namespace bytelm
