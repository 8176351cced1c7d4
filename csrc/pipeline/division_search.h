#pragma once

#include <cstddef>
#include <cstdint>
#include <queue>
#include <vector>

#include "pipeline/objective.h"
#include "reef/pipeline_partition.h"

namespace reef {

/// Searches divisions of a chain from the first chunk on, the most promising first. What the rest costs at
/// least is found beforehand, from the last place on: the least sum and the least maximum, each as if the
/// other did not count.
class DivisionSearch {
 public:
  /// A chunk has up to `most_ranks` places. The prices must outlive it.
  DivisionSearch(PipelineObjective objective, const PiecePrices& prices, std::uint32_t micro_batches,
                 std::uint32_t most_ranks);

  /// Returns the `count` divisions of least value, or all if there are fewer, in ascending order of it.
  std::vector<PipelineDivision> best(std::size_t count);

 private:
  struct Part {
    double at_least = 0;
    PipelineDivision division;  ///< of the first chunks, with where the next one begins
    PipelineValue value;
    std::uint32_t place = 0, begin = 0;  ///< of the next chunk
  };
  struct Later {
    bool operator()(const Part& a, const Part& b) const { return a.at_least > b.at_least; }
  };

  bool is_whole(const Part& part) const { return part.place == prices_.places(); }
  /// Calls visit(ranks, end) for each chunk that may begin there.
  template <class Visit>
  void for_each_chunk(std::uint32_t place, std::uint32_t begin, const Visit& visit) const;
  PipelineValue& least(std::uint32_t place, std::uint32_t begin) {
    return least_[std::size_t{place} * (prices_.stages() + 1) + begin];
  }
  void find_least();
  Part extended(const Part& from, std::uint32_t ranks, std::uint32_t end);
  /// Adds each next chunk; once there are very many parts, only the most promising one.
  void extend(const Part& from);

  PipelineObjective objective_;
  const PiecePrices& prices_;
  std::uint32_t micro_batches_;
  std::uint32_t most_ranks_;
  std::vector<PipelineValue> least_;  ///< of each place and stage with which a chunk may begin
  std::priority_queue<Part, std::vector<Part>, Later> open_;
};

}  // namespace reef
