#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "given_momentum.h"
#include "noted_parameters.h"
#include "reef/shard.h"
#include "shard/agreement.h"
#include "shard/frozen16.h"
#include "shard/gatherer.h"
#include "shard/norms_of_parts.h"
#include "shard/reducer.h"
#include "shard/state_over_ranks.h"

namespace reef {

/// Parameters that a Shard or a DdpHook has already.
struct ClaimedByShard {};
using ClaimedParameters = NotedParameters<ClaimedByShard>;

struct Shard::Parts {
  Parts() = default;
  ~Parts();
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  /// Throws ConfigError if the module is not what it was: a parameter is another, or has other memory,
  /// autograd has forgotten who listens, or a parameter that had no gradient requires one now.
  void check_parameters() const;
  /// Takes its buffers as they are now.
  void look_at_buffers();
  void check_module();  ///< both
  /// Whether a divided parameter lies where the shard has put it.
  bool has_its_memory(std::size_t item) const;
  /// Under which name the shard has a parameter; nothing, if it has not, or other memory.
  std::optional<std::string> name_of(const at::Tensor& parameter) const;
  /// What becomes of buffers when gradients have been reduced, or parameters, over these ranks.
  void make_alike(const ProcessGroupPtr& over);
  /// The shard's, without a look at the module.
  StateDict full_state_dict(bool rank0_only) const;
  /// Checks what load_state_dict() is given, and returns what loads it. All ranks alike.
  std::function<void()> prepared_load(const std::vector<StateDict>& given);
  /// Asks for parameters as a forward pass does, so that ranks settle what a step has made of them.
  void use_parameters() const;
  /// Until no update of parts is under way.
  void wait_for_update() const;
  /// And parameters become what parts are. All ranks alike.
  void finish_update() const;

  /// Notes a call that all ranks make alike (see note_call()).
  void note(const char* call) const;

  GroupTags exchanges;
  std::optional<ExchangePrices> prices;  ///< by which compression was chosen
  std::string shard;                     ///< its name in errors
  ClaimedParameters claimed;
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  Named all_parameters;  ///< under every name
  Named all_buffers;
  ModuleNow module_now;
  ShardOptions options;
  Named frozen;  ///< parameters without a gradient that are not left to each rank
  DividedParameters divided;
  Frozen16 frozen16;
  std::vector<c10::Storage> memory;  ///< of what is divided; empty: nothing is
  std::unique_ptr<Gatherer> gatherer;
  std::optional<NormsOfParts> norms;  ///< where parts are not whole
  std::optional<Reducer> reducer;
  std::shared_ptr<GivenMomentum> momentum;  ///< one_bit_adam: of these parameters
  ParametersOfMomentum with_momentum;
  int no_sync = 0;
  int local_sums = 0;
  UpdateBeside* update = nullptr;
  /// Of LocalUpdates, which are to be told where parameters are loaded; empty: there are none.
  std::function<void()> begin_round;
};

}  // namespace reef
