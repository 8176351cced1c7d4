#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "distributed/group_tags.h"
#include "distributed/slice_exchange.h"

namespace reef {

/// Synchronizes weights that each virtual worker of HetPipe (2005.14038, section 5) updates for itself. What
/// a worker's updates have changed in a wave is sent to the others, and these changes are added to common
/// weights, wave after wave and worker after worker. A wave is a run of micro-batches; waves are numbered
/// from 0 in a call of train(). Bytes: two copies of the weights, and for each of `staleness` + 1 waves one
/// of each worker's, in the host's memory.
class PipelineWaves {
 public:
  struct Rule {
    std::uint32_t waves = 1;      ///< of the call
    std::uint32_t staleness = 0;  ///< how many waves of others a worker may lack (D)
  };
  /// `ranks`: those that have the weights, one of each worker, in the order of workers, over gloo. All of
  /// them make one alike, and the parameters are the same on all. Throws RankFailed.
  PipelineWaves(std::vector<at::Tensor> parameters, const ProcessGroupPtr& ranks, Rule rule);

  /// Ends a wave, whose last update has been made: sends what it has changed to the other workers, and sets
  /// the parameters to the common weights, which contain all workers' waves up to `staleness` waves before
  /// this one, plus this worker's later changes. After the last wave they contain all waves. Waits for
  /// workers that are further behind. Throws PassAbandoned if a pass of one of them has failed, and
  /// RankFailed.
  void end(std::uint32_t wave);
  /// Tells the others that a pass has failed here, for all waves up to this one that have not ended, and
  /// waits for workers that are further behind, as end() does.
  void leave(std::uint32_t wave) noexcept;

 private:
  /// What the workers' updates have changed in a wave.
  struct Wave {
    at::Tensor slices;                ///< bytes, of one worker after another
    std::function<void()> wait = {};  ///< for those of others
  };
  /// Gives how many waves of others the weights may lack when a wave has ended.
  std::size_t may_lack(std::uint32_t wave) const { return wave + 1 == rule_.waves ? 0 : rule_.staleness; }
  void tell(bool has_failed);
  void add_change(const at::Tensor& slices, int worker, const std::vector<at::Tensor>& to) const;
  void add_first_wave();

  std::vector<at::Tensor> parameters_;
  Rule rule_;
  GroupTags number_;
  SliceExchange exchange_;
  std::vector<std::int64_t> begins_;  ///< of each parameter in a slice
  std::int64_t slice_bytes_ = 0;
  std::vector<at::Tensor> common_;  ///< what waves of all workers have made
  std::vector<at::Tensor> before_;  ///< the parameters when this wave began
  std::deque<Wave> told_;           ///< that are not part of common_
  std::uint32_t ended_ = 0;         ///< waves
};

}  // namespace reef
