#pragma once

#include <string>

#include "reef/shard.h"

namespace reef {

/// Reduces the gradients of a shard when reduce() is called, instead of in each backward pass: for programs
/// of many small backward passes, as a pipeline's. Between the calls each rank adds up its own gradients, in
/// .grad of the module's parameters. The constructor changes the shard for good. The shard must outlive it.
/// All ranks call each of these alike, but for tell_failed(), check() and answer().
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
  /// Takes part in what is reduce() on other ranks, where PassAbandoned is thrown then: a pass has failed
  /// here. Drops this rank's gradients.
  void abandon(const std::string& why) noexcept;
  /// Drops the sums of all ranks. Call it instead of reduce() if a pass has failed on any rank. Throws
  /// RankFailed.
  void leave_out();
  /// Tells the other ranks that a pass has failed here, so they do not wait for this rank's gathers.
  void tell_failed();
  /// Waits for what this rank has begun to gather: see Gatherer::settle().
  void settle();
  /// Takes part in what other ranks gather. False: they never ask.
  bool answer();
  /// Whether ranks have gradients in parts, and not the module's parameters.
  bool has_parts() const;

 private:
  Shard& shard_;
};

}  // namespace reef
