#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "pipeline_run/chunk.h"
#include "pipeline_run/parameters.h"
#include "pipeline_run/waves.h"
#include "pipeline_run/weights.h"

namespace reef {

/// The updates of this rank's chunks in a call of Pipeline::train(). While it lives, the chunks' passes use
/// the versions of weights that the schedule says.
class PipelineTraining {
 public:
  struct Options {
    std::function<void()> update;  ///< makes an optimizer update those parameters that have gradients
    std::uint32_t replicas = 1;
    /// Gradients are divided by the number of micro-batches, of all replicas, whose gradients are added up.
    bool divides = false;
    double correction_decay = 0;  ///< see PipelineOptions
  };
  /// All ranks make one alike. Throws RankFailed.
  PipelineTraining(std::map<std::uint32_t, PipelineChunk>& chunks, PipelineParameters& parameters,
                   const PipelineSchedule& schedule, Options options);
  /// Gives the chunks their newest weights, in the memory that they had at first.
  ~PipelineTraining();
  PipelineTraining(const PipelineTraining&) = delete;
  PipelineTraining& operator=(const PipelineTraining&) = delete;

  /// Updates a chunk with its gradients up to those of the micro-batch, and lets go of them. Throws
  /// PassAbandoned if a rank with which it shares its weights leaves that, and RankFailed.
  void update(std::uint32_t chunk, std::uint32_t micro_batch);
  /// Takes part in that on a rank where a pass has failed.
  void leave(std::uint32_t chunk, std::uint32_t micro_batch, const std::string& why) noexcept;
  /// How many updates each chunk has had, a line each.
  std::string updates() const;
  /// Returns the updates() of all ranks as one sentence if they have not left one model: if chunks have had
  /// different numbers of updates or, where replicas update for themselves, any. Otherwise it is empty.
  std::string uneven(const std::vector<std::string>& of_all) const;

 private:
  void add_waves(std::uint32_t chunk, const PipelineSchedule& schedule);
  /// Calls `visit` with each group of parameters that a chunk shares, if a wave ends with the micro-batch.
  void at_end_of_wave(std::uint32_t chunk, std::uint32_t micro_batch,
                      const std::function<void(PipelineWaves& waves, std::uint32_t wave)>& visit);

  std::map<std::uint32_t, PipelineChunk>& chunks_;
  PipelineParameters& parameters_;
  Options options_;
  std::uint32_t wave_;  ///< the number of micro-batches in one, if replicas update for themselves, or 0
  std::map<std::uint32_t, PipelineWeights> weights_;
  std::map<std::uint32_t, std::deque<PipelineWaves>> waves_;  ///< of each chunk
  std::map<std::uint32_t, std::uint32_t> updated_;  ///< of each chunk, micro-batches up to its last update
};

}  // namespace reef
