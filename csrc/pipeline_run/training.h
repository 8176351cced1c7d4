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
  /// `divides`: gradients are divided by the number of micro-batches whose gradients an update adds up.
  /// `step`: makes an optimizer update those parameters that have gradients.
  PipelineTraining(std::map<std::uint32_t, PipelineChunk>& chunks, const PipelineSchedule& schedule,
                   bool divides, std::function<void()> step);
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
  bool divides_;
  std::function<void()> step_;
  std::map<std::uint32_t, PipelineWeights> weights_;
  std::map<std::uint32_t, std::uint32_t> updated_;  ///< of each chunk, micro-batches up to its last update
};

/// Returns what ranks say about their updates() in a sentence, or nothing if all chunks have had as many.
std::string uneven_updates(const std::vector<std::string>& updates);

}  // namespace reef
