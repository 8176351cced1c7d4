#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reef/compression.h"

namespace reef::bind {

/// Entries of all options, in order.
inline CompressionOptions compression_options(const std::vector<std::string>& names,
                                              const std::vector<std::int64_t>& steps,
                                              const std::vector<double>& values) {
  CompressionOptions options;
  for (std::size_t i = 0; i < names.size();) {
    std::vector<StepSchedule::Entry> entries;
    const std::string& name = names[i];
    for (; i < names.size() && names[i] == name; ++i) entries.emplace_back(steps[i], values[i]);
    set_compression_option(options, name, StepSchedule(std::move(entries)));
  }
  return options;
}

}  // namespace reef::bind
