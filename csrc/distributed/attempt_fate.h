#pragma once

#include <cstdint>
#include <string>

#include "distributed/store.h"

namespace reef {

/// What has become of one attempt to bring up a group. It stands in the store under one key, which changes by
/// compare-and-set alone: so what any rank finds decided is decided for all, and cannot be taken back.
struct AttemptFate {
  enum class Kind : std::uint8_t {
    kOpen,      ///< ranks still come
    kTogether,  ///< all have come, and connect
    kUp,        ///< all are connected
    kAnew,      ///< a rank came a second time before all had come: whoever waits begins the next attempt
    kMissed,    ///< some had not come when one rank's time was over: whoever comes now begins the next
    kFailed,    ///< a rank cannot join: told to all that come until one who knows begins the next
  };
  Kind kind = Kind::kOpen;
  std::string reason;  ///< of kMissed and kFailed; else ""

  bool has_failed() const { return kind == Kind::kMissed || kind == Kind::kFailed; }

  /// `store` must hold keys of the attempt alone.
  static AttemptFate of(c10d::Store& store);
  /// Makes this the attempt's fate if that is `before` (kOpen or kTogether). Gives what it is then.
  AttemptFate decide(c10d::Store& store, Kind before) const;
};

}  // namespace reef
