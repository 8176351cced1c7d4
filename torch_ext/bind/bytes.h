#pragma once

#include <cstdint>
#include <string>

#include "reef/error.h"

namespace reef::bind {

/// Python's numbers have signs. Throws ConfigError, which says `what` it is.
inline std::uint64_t bytes_of(std::int64_t bytes, const char* what) {
  if (bytes < 0)
    throw ConfigError(std::string(what) + " is " + std::to_string(bytes) + " bytes; give 0 or more");
  return static_cast<std::uint64_t>(bytes);
}

}  // namespace reef::bind
