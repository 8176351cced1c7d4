#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data (no Torch): what a chain of stages costs, each in bytes and seconds. Stage i reads the output of
/// stage i - 1, and nothing else that another stage makes.

/// One stage, in the terms of Beaumont et al. (1911.13214, section 3). Its tape is what autograd saves in its
/// forward pass for its backward pass; peaks are above what is alive when it begins.
struct StageProfile {
  std::string name;
  std::uint64_t output_bytes = 0;  ///< and of the gradient of the output
  /// Of the tape: without the stage's input; with its output, if it holds that.
  std::uint64_t tape_bytes = 0;
  bool tape_has_input = true;  ///< which it then keeps alive besides
  bool tape_has_output = false;
  std::uint64_t forward_bytes = 0;   ///< peak of a forward pass that keeps no tape, output included
  std::uint64_t taped_bytes = 0;     ///< peak of one that does, tape and output included
  std::uint64_t retape_bytes = 0;    ///< peak of one that ends once the tape is whole, tape included
  std::uint64_t backward_bytes = 0;  ///< peak of a backward pass, in which all that it makes is counted
  /// Of what it makes, gradients of parameters that stay when it is over; 0 where there are gradients to add
  /// to.
  std::uint64_t gradient_bytes = 0;
  double forward_seconds = 0;
  double retape_seconds = 0;  ///< of a forward pass that ends once the tape is whole
  double backward_seconds = 0;
  /// Of the measurements that these are medians of: the middle half's width over the median, the largest of
  /// the three.
  double spread = 0;
};

/// How a tier copies from and to a device's memory, one copy at a time: see tier_speed().
struct TierSpeed {
  double bytes_per_second = 0;  ///< of the slower way; 0: there is no tier
  /// For what share of a copy's time stages wait, as it takes a core that they would use, of the slower way
  /// by that: about 1 for copies within host memory, less for a disk's; 0 for a device's own, and where the
  /// process may use more cores than LibTorch has threads.
  double work_share = 0;
};

struct ChainProfile {
  std::vector<StageProfile> stages;
  /// Of tensors that stages both read and write, as they were before: kept from forward to backward, whatever
  /// the schedule. Part of every peak.
  std::uint64_t state_bytes = 0;
  TierSpeed tier_speed = {};
  std::uint64_t tier_capacity_bytes = 0;

  /// A line a stage, and one of sums.
  REEF_API std::string table() const;
  REEF_API std::string json() const;
};

/// Throws ConfigError for what json() has not written.
REEF_API ChainProfile chain_profile_from_json(std::string_view text);

/// Throws ConfigError, naming the stage, if there is none, if seconds are negative or not finite, if a peak
/// is below what is left of it, or a tape below the output that it has; and if the tier's speed is negative
/// or not finite, or its share of work not within 0 and 1.
REEF_API void check(const ChainProfile& profile);

}  // namespace reef
