#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reef/export.h"

namespace reef {

/// Pure data and pure code (no Torch): what a message between two ranks costs, and how that is found out.

/// Between any two ranks, and alike in both directions, which do not disturb each other. A rank sends one
/// message after another, and receives one after another: each takes `message_seconds` and its bytes over
/// `bytes_per_second`, and is there `latency_seconds` after it has been sent, which messages that are under
/// way together share.
struct Link {
  double latency_seconds = 0;
  double bytes_per_second = 0;
  double message_seconds = 0;
};

/// "0.436 ms of latency, 0.000 ms a message, 111.1 MB/s" (of 10^6 bytes).
REEF_API std::string link_text(const Link& link);
/// Throws ConfigError for what no link can have: numbers that are not finite, negative ones, no bandwidth.
REEF_API void check_link(const Link& link);

/// What was measured: `rounds` that wait for each other, in which a rank sends and receives `messages` of
/// `bytes`, all rounds together, took `seconds`.
struct LinkSample {
  double rounds = 0;
  double messages = 0;
  double bytes = 0;
  double seconds = 0;
};

struct LinkFit {
  Link link;
  double worst_error = 0;  ///< the largest difference from what was measured, as a share of that
  std::vector<LinkSample> samples;

  /// link_text(), and how well it fits.
  REEF_API std::string text() const;
};

/// The link of the least squares of relative errors, none of whose numbers is negative. Throws ConfigError
/// for samples that do not tell a bandwidth: too few, all of one size, or so small that larger ones took no
/// longer.
REEF_API LinkFit fit_link(std::vector<LinkSample> samples);

/// What samples say however noisy they are, as noise only adds time: no more latency than the fastest round
/// took, at least the bandwidth of the fastest sample, and no time for each message. For samples of which
/// fit_link() tells no bandwidth. Throws ConfigError where there are none.
REEF_API LinkFit bound_link(std::vector<LinkSample> samples);

}  // namespace reef
