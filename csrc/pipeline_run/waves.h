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

/// Weights that the virtual workers of HetPipe (2005.14038, section 5) each update for themselves, and what
/// all of their waves make of them: the sum of the changes that each worker's updates have made in each wave,
/// added up in the order of waves and of workers. A wave is a number of micro-batches in a row; waves are
/// numbered from 0 in a call of train(). Bytes: two copies of the weights, and for each of `staleness` + 1
/// waves one of each worker's, in the host's memory.
class PipelineWaves {
 public:
  struct Rule {
    std::uint32_t waves = 1;      ///< of the call
    std::uint32_t staleness = 0;  ///< how many waves of others a worker may lack (D)
  };
  /// `ranks`: those that have the weights, one of each worker, in the order of workers, over gloo. All of
  /// them make one alike, and the parameters are the same on all. Throws RankFailed.
  PipelineWaves(std::vector<at::Tensor> parameters, const ProcessGroupPtr& ranks, Rule rule);

  /// Is called when the last update of a wave has been made: tells the other workers what the wave has
  /// changed. Gives the parameters what the waves of all workers up to `staleness` before make of them, and
  /// adds this worker's later ones; after the last wave, what all waves make of them. Waits for workers that
  /// are further behind. Throws PassAbandoned if a pass of one of them has failed, and RankFailed.
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
