// What tests of exchanges share: one group for the program, numbers of exchanges, and among whom gradients
// are divided.
#pragma once

#include <string>
#include <vector>

#include "collectives_only.h"
#include "distributed/tag_space.h"
#include "messages.h"
#include "reef/shard.h"

namespace reef::exchanges {

using messages::rank;
using messages::size;

inline const ProcessGroupPtr& group() { return messages::world(); }
/// The same ranks, by collectives alone.
inline const ProcessGroupPtr& group_without_messages() {
  static const ProcessGroupPtr the_group = collectives_only(group());
  return the_group;
}

/// A number for an exchange of either group, which none of the last thousand has. All ranks ask alike.
inline int next_number() {
  static int last = 0;
  constexpr int kGivenOut = TagSpace::kNumbers - TagSpace::kFirstFree;
  return TagSpace::kFirstFree + last++ % kGivenOut;
}

/// Returns the numbers of ranks among which a stage may divide.
inline std::vector<int> degrees(Stage stage) {
  std::vector<int> all;
  for (int degree = 1; degree <= size(); ++degree) {
    if (size() % degree == 0 && (stage != Stage::kReplicate || degree == size())) all.push_back(degree);
  }
  return all;
}

/// Returns how a row names its stage and degree in a failure.
inline std::string text_of(Stage stage, int degree) {
  return "stage " + std::to_string(static_cast<int>(stage)) + " among " + std::to_string(degree);
}

}  // namespace reef::exchanges
