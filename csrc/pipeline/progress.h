#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "reef/pipeline_schedule.h"

namespace reef {

/// Whether an action makes the gradient of its chunk's input.
inline bool makes_gradient(PipelineAction::Kind kind) {
  return kind == PipelineAction::Kind::kBackward || kind == PipelineAction::Kind::kInput;
}
/// Whether an action makes the gradients of its chunk's weights, after which nothing of the pass is kept.
inline bool makes_weight_gradients(PipelineAction::Kind kind) {
  return kind == PipelineAction::Kind::kBackward || kind == PipelineAction::Kind::kWeight;
}

/// Counts the passes that are between F and B or W at once, at most: those of one chunk, or of all.
inline std::uint32_t most_in_flight(const std::vector<PipelineAction>& actions,
                                    std::optional<std::uint32_t> chunk = {}) {
  std::uint32_t now = 0, most = 0;
  for (const PipelineAction& action : actions) {
    if (chunk && action.chunk != *chunk) continue;
    if (action.kind == PipelineAction::Kind::kForward) most = std::max(most, ++now);
    if (makes_weight_gradients(action.kind)) --now;
  }
  return most;
}

/// Returns the ranks that have a chunk in one of the directions.
inline std::set<std::uint32_t> ranks_of_chunk(const PipelineSchedule& schedule, std::uint32_t chunk) {
  std::set<std::uint32_t> ranks;
  for (const std::vector<std::uint32_t>& rank_of : schedule.rank_of) ranks.insert(rank_of[chunk]);
  return ranks;
}

/// How errors name what an action does.
const char* pass_of(PipelineAction::Kind kind);

/// Lets each rank run the actions of `more` behind those of `to`, whose micro-batches are numbered on.
void append(const PipelineSchedule& more, PipelineSchedule& to);

/// Throws ConfigError unless each chunk of each direction is on a rank that there is.
void check_placement(const PipelineSchedule& schedule);
/// Throws ConfigError for the same, and unless each chunk runs as often as check() says, on its rank.
void check_actions(const PipelineSchedule& schedule);
/// Throws ConfigError, which names the action at which each rank stands that has not run all of its actions.
void check_all_ran(const PipelineSchedule& schedule, const std::vector<std::size_t>& ran);

/// What the ranks of a pipeline have computed so far, and so what may run next.
class PipelineProgress {
 public:
  explicit PipelineProgress(const PipelineSchedule& schedule)
      : chunks_(schedule.chunks()),
        micro_batches_(schedule.micro_batches),
        forward_(std::size_t{chunks_} * micro_batches_),
        gradient_(forward_.size()) {}

  bool has_output(std::uint32_t chunk, std::uint32_t micro_batch) const {
    return forward_[at(chunk, micro_batch)];
  }
  bool has_gradient(std::uint32_t chunk, std::uint32_t micro_batch) const {
    return gradient_[at(chunk, micro_batch)];
  }

  bool may_run(const PipelineAction& action) const {
    const auto [kind, chunk, micro_batch] = action;
    switch (kind) {
      case PipelineAction::Kind::kForward:
        return chunk == 0 || has_output(chunk - 1, micro_batch);
      case PipelineAction::Kind::kBackward:
      case PipelineAction::Kind::kInput:
        return has_output(chunk, micro_batch) &&
               (chunk + 1 == chunks_ || has_gradient(chunk + 1, micro_batch));
      case PipelineAction::Kind::kWeight:
      case PipelineAction::Kind::kUpdate:
        return has_gradient(chunk, micro_batch);
    }
    return false;
  }

  void ran(const PipelineAction& action) {
    const std::size_t place = at(action.chunk, action.micro_batch);
    if (action.kind == PipelineAction::Kind::kForward) forward_[place] = true;
    if (makes_gradient(action.kind)) gradient_[place] = true;
  }

 private:
  std::size_t at(std::uint32_t chunk, std::uint32_t micro_batch) const {
    return std::size_t{chunk} * micro_batches_ + micro_batch;
  }

  std::uint32_t chunks_;
  std::uint32_t micro_batches_;
  std::vector<bool> forward_;
  std::vector<bool> gradient_;
};

/// Calls `visit(rank, index)` for each action after all that it needs: a possible order of events. Throws
/// ConfigError if ranks would wait for each other for ever. The actions are those that check_actions()
/// accepts.
template <class Visit>
void visit_as_ranks_run(const PipelineSchedule& schedule, const Visit& visit) {
  PipelineProgress progress(schedule);
  std::vector<std::size_t> done(schedule.ranks());
  for (bool moved = true; moved;) {
    moved = false;
    for (std::uint32_t rank = 0; rank < schedule.ranks(); ++rank) {
      const std::vector<PipelineAction>& actions = schedule.actions[rank];
      for (; done[rank] < actions.size() && progress.may_run(actions[done[rank]]); ++done[rank]) {
        progress.ran(actions[done[rank]]);
        visit(rank, done[rank]);
        moved = true;
      }
    }
  }
  check_all_ran(schedule, done);
}

}  // namespace reef
