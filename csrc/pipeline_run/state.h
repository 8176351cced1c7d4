#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pipeline_run/stages.h"
#include "reef/shard.h"

namespace reef {

class Together;  // of what ranks do together

/// Saves and loads the model and the optimizers of a pipeline whose segments are shards. Pipeline documents
/// the functions of the same names. All ranks call each of them alike.
class PipelineState {
 public:
  /// Ranks that have the same chunks.
  struct Segment {
    std::int64_t first_rank;             ///< of the group: it speaks for the others
    Shard* shard;                        ///< nullptr on ranks that have others
    std::set<std::string> names = {};    ///< of parameters and buffers, where there is a shard
    std::set<std::string> trained = {};  ///< of those that require a gradient
  };

  /// `aliases`: other names of parameters, by which models know them, too. Throws RankFailed.
  PipelineState(ProcessGroupPtr group, std::vector<Segment> segments, const StageNames& own_names,
                std::map<std::string, std::string> aliases);

  StateDict full_state_dict(bool rank0_only);
  void load_state_dict(std::vector<StateDict> given);
  OptimizerState full_optimizer_state(const OptimizerState& own, bool rank0_only);
  OptimizerState own_optimizer_state(const OptimizerState& own, std::vector<OptimizerState> given,
                                     const std::string& rule);

 private:
  /// The place of a parameter or a buffer in the whole model; of a part, that of its parameter. Throws
  /// ConfigError if the model has none of this name.
  std::size_t place_of(const std::string& name) const;
  std::vector<std::string> group_names_of(const OptimizerState::Group& own) const;
  void of_each_segment(Together& together, const std::function<void(const Segment&)>& work) const;

  ProcessGroupPtr group_;
  std::vector<Segment> segments_;
  std::map<std::string, std::size_t> places_;  ///< by name
  std::map<std::string, std::string> aliases_;
};

}  // namespace reef
