#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data and pure code (no Torch): what a message between two ranks costs, and how to fit that to
/// measurements.

/// A model of the network between any two ranks. A rank sends one message at a time and receives one at a
/// time, and the two directions do not disturb each other. A message occupies its sender and its receiver for
/// `message_seconds` plus its bytes over `bytes_per_second`, and arrives `latency_seconds` after it was sent.
/// Messages that are under way at the same time share the latency.
struct Link {
  double latency_seconds = 0;
  double bytes_per_second = 0;
  double message_seconds = 0;
};

/// Formats a link as "0.436 ms of latency, 0.000 ms a message, 111.1 MB/s" (MB are 10^6 bytes).
REEF_API std::string link_text(const Link& link);
/// Throws ConfigError if a number is negative or not finite, or if the bandwidth is zero.
REEF_API void check_link(const Link& link);

/// One measurement: a number of rounds, each of which begins when the one before has ended.
struct LinkSample {
  double rounds = 0;
  double messages = 0;  ///< that a rank sends, and receives, in all rounds together
  double bytes = 0;     ///< of all these messages
  double seconds = 0;   ///< that all rounds took
};

struct LinkFit {
  Link link;
  double worst_error = 0;  ///< the largest relative difference between a sample and the link's prediction
  std::vector<LinkSample> samples;

  /// Gives link_text() and how well it fits: "..., within 7 % of 20 measurements".
  REEF_API std::string text() const;
};

/// Fits a link to samples: least squares of the relative errors, with no number below zero. Throws
/// ConfigError for samples that determine no bandwidth: too few, all of one size, or so small that larger
/// messages took no longer.
REEF_API LinkFit fit_link(std::vector<LinkSample> samples);

/// Bounds a link from samples that are too noisy for fit_link(). Noise only adds time, so the latency is at
/// most what the fastest round took, and the bandwidth at least that of the fastest sample; no time is
/// attributed to messages. Throws ConfigError if there are no samples.
REEF_API LinkFit bound_link(std::vector<LinkSample> samples);

}  // namespace reef
