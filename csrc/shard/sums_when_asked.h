#pragma once

#include "reef/shard.h"

namespace reef {

/// The gradients of a shard that are reduced when that is asked for, and not by each pass of backward: for
/// programs whose passes are many and small, as those of a pipeline. Until then they are each rank's own
/// sums, where autograd puts them. From the constructor on, for good. The shard must outlive it. All ranks
/// call each of these alike, but for tell_failed(), check() and answer().
class SumsWhenAsked {
 public:
  /// `in_one_order`: all ranks use parameters in the same order. If not, whoever waits for parameters of
  /// which each has a part (kParameters) asks the others soon, who answer() while they wait elsewhere.
  SumsWhenAsked(Shard& shard, bool in_one_order);

  /// Makes ranks settle what steps have made of the parameters, as the first operator that reads one would.
  /// Throws RankFailed.
  void use_parameters();
  /// Throws ConfigError if this rank's gradients cannot be reduced, or its module is not what it was.
  void check() const;
  /// Gives parameters() the sums over the ranks. Throws as a pass of backward does at its end.
  void reduce();
  /// In place of reduce(), where passes of some rank have failed: the sums of no rank count. Throws
  /// RankFailed.
  void leave_out();
  /// This rank's passes have failed, so it will not come to what other ranks gather.
  void tell_failed();
  /// Takes part in what other ranks gather. False: they never ask.
  bool answer();
  /// Whether ranks have gradients in parts, and not the module's parameters.
  bool has_parts() const;

 private:
  Shard& shard_;
};

}  // namespace reef
