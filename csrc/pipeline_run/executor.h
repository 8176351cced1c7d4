#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/course.h"
#include "pipeline_run/chunk.h"
#include "pipeline_run/mail.h"
#include "pipeline_run/unmodified_tensors.h"

namespace reef {

/// Executes this rank's actions of a schedule, one after another. The group may have several replicas of the
/// pipeline, which exchange no messages; see rank_in_group(). Whatever fails becomes a failure of all ranks:
/// a rank that has failed goes through the rest of its actions without computing, and says in place of each
/// message why it has none.
class PipelineExecutor {
 public:
  using Tensors = PipelineStage::Tensors;
  /// What a run computes besides the chunks.
  struct Run {
    const PipelineCourse* course = nullptr;  ///< what is run
    bool trains = false;                     ///< or runs forward only
    PipelineSeed seed;
    std::function<Tensors(std::uint32_t micro_batch)> input;  ///< of the first chunk
    /// Is given the last chunk's outputs. Returns what backward begins at.
    std::function<Tensors(std::uint32_t micro_batch, const Tensors& outputs)> finish;
    /// Updates a chunk, with the gradients up to those of the micro-batch.
    std::function<void(std::uint32_t chunk, std::uint32_t micro_batch)> update;
    /// Is called in its place if this rank has failed.
    std::function<void(std::uint32_t chunk, std::uint32_t micro_batch, const std::string& why)> leave_update;
    std::function<void()> settle;         ///< is called when this rank has performed all of its actions
    std::function<std::string()> report;  ///< what all ranks are to know of this one afterwards
    std::function<void()> failed;         ///< is called at once if this rank has failed
    Meanwhile meanwhile;
  };

  /// All ranks of the group alike. `tag`: as for PipelineMail. Throws RankFailed.
  PipelineExecutor(PipelineSchedule schedule, std::vector<PipelineSkip> skips, ProcessGroupPtr group,
                   std::uint32_t replicas, int tag);

  /// Returns the report of each rank. Throws the error of this rank if it has failed, PassAbandoned if
  /// another one has, RankFailed and RanksOutOfStep.
  std::vector<std::string> run(const Run& run);

  std::map<std::uint32_t, PipelineChunk>& chunks() { return chunks_; }  ///< this rank's
  const PipelineCourse& training() const { return training_; }
  const PipelineCourse& serving() const { return serving_; }
  /// Returns what this rank's replica runs by a schedule of the same chunks.
  PipelineCourse course(PipelineSchedule schedule, std::uint32_t lanes = 0) const;
  std::uint32_t replica() const { return replica_; }  ///< this rank's

 private:
  void perform(const PipelineAction& action, const Run& run);
  /// Waits for what an action needs.
  PassTensors take(const PipelineAction& action, const Run& run);
  /// Gives what an action has made to those that need it or, if it has failed, says why there is nothing.
  void pass_on(const PipelineAction& action, const PassTensors& made, const std::string& failed = {});
  std::string place_of(const PipelineAction& action) const;
  void check_passed_on() const;
  std::vector<std::string> agree(const std::string& own, const std::exception_ptr& failed,
                                 const Meanwhile& meanwhile);

  ProcessGroupPtr group_;
  std::uint32_t replicas_;
  std::uint32_t replica_;  ///< of this rank
  std::uint32_t rank_;     ///< in it
  std::vector<PipelineSkip> skips_;
  PipelineCourse training_, serving_;
  const PipelineCourse* now_ = nullptr;  ///< that of this run
  PipelineMail mail_;
  std::map<std::uint32_t, PipelineChunk> chunks_;
  /// What chunks of this rank have made for each other.
  std::map<PipelineMail::Key, TensorListMessage> handed_over_;
  UnmodifiedTensors<PipelineAction> passed_on_;
};

}  // namespace reef
