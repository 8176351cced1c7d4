#include "shard/outer_schedule.h"

#include <numeric>

namespace reef {

// A part ends with the tensor in whose first half its share of all elements ends.
std::vector<std::size_t> cut_into_parts(const std::vector<std::int64_t>& elements, std::size_t parts) {
  const std::int64_t all = std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
  std::vector<std::size_t> ends;
  std::size_t end = 0;
  std::int64_t before = 0;
  for (std::size_t part = 0; part < parts; ++part) {
    const std::size_t last = elements.size() - (parts - 1 - part);  // one is left for each part behind
    const std::int64_t share = all / static_cast<std::int64_t>(parts) * static_cast<std::int64_t>(part + 1);
    const std::size_t first = end;
    while (end < last && (end == first || part + 1 == parts || before + elements[end] / 2 < share))
      before += elements[end++];
    ends.push_back(end);
  }
  return ends;
}

}  // namespace reef
