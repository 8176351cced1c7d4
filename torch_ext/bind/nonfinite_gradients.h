#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "reef/nonfinite_gradients.h"

namespace reef::bind {

/// Parameters, ranks (-1: none) and numbers of elements.
inline std::tuple<std::vector<std::string>, std::vector<std::int64_t>, std::vector<std::int64_t>> data_of(
    const std::vector<NonFiniteElements>& found) {
  std::tuple<std::vector<std::string>, std::vector<std::int64_t>, std::vector<std::int64_t>> all;
  for (const NonFiniteElements& each : found) {
    std::get<0>(all).push_back(each.parameter);
    std::get<1>(all).push_back(each.rank.value_or(-1));
    std::get<2>(all).push_back(each.elements);
  }
  return all;
}

}  // namespace reef::bind
