#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "pipeline_run/chunk.h"
#include "pipeline_run/weights.h"

namespace reef {

/// The updates of this rank's chunks in a call of Pipeline::train(). While it lives, the chunks' passes use
/// the versions of weights that the schedule says.
class PipelineTraining {
 public:
  /// What an update is made of.
  struct Update {
    /// Adds up a chunk's gradients over replicas.
    std::function<void(std::uint32_t chunk)> reduce;
    /// By what gradients are divided for each micro-batch whose gradients are added up; 0: they are not.
    std::uint32_t divisor = 0;
    /// Makes an optimizer update those parameters that have gradients.
    std::function<void()> step;
    double correction_decay = 0;  ///< see PipelineOptions
  };
  PipelineTraining(std::map<std::uint32_t, PipelineChunk>& chunks, const PipelineSchedule& schedule,
                   Update update);
  /// Gives the chunks their newest weights, in the memory that they had at first.
  ~PipelineTraining();
  PipelineTraining(const PipelineTraining&) = delete;
  PipelineTraining& operator=(const PipelineTraining&) = delete;

  /// Updates a chunk with its gradients up to those of the micro-batch, and lets go of them.
  void update(std::uint32_t chunk, std::uint32_t micro_batch);
  /// How many updates each chunk has had, a line each.
  std::string updates() const;

 private:
  std::map<std::uint32_t, PipelineChunk>& chunks_;
  Update update_;
  std::map<std::uint32_t, PipelineWeights> weights_;
  std::map<std::uint32_t, std::uint32_t> updated_;  ///< of each chunk, micro-batches up to its last update
};

/// Returns the updates() of all ranks as one sentence; empty if all chunks have had the same number.
std::string uneven_updates(const std::vector<std::string>& updates);

}  // namespace reef
