#pragma once

#include <string>

#include "reef/collectives.h"
#include "reef/error.h"

namespace reef::bind {

inline Reduction reduction_of(const std::string& name) {
  if (name == "sum") return Reduction::kSum;
  if (name == "mean") return Reduction::kMean;
  throw ConfigError("reduction '" + name + "' is not \"sum\" or \"mean\"");
}

}  // namespace reef::bind
