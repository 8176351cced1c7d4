#include <algorithm>
#include <deque>
#include <utility>

#include "pipeline/generators.h"

namespace reef {
namespace {

/// Chunk c is on rank c for even micro-batches, and on rank S - 1 - c for odd ones.
std::vector<std::vector<std::uint32_t>> both_ways(std::uint32_t ranks) {
  std::vector<std::uint32_t> down = straight_placement(ranks), up = down;
  std::reverse(up.begin(), up.end());
  return {std::move(down), std::move(up)};
}

/// The eight phases of DualPipe for one rank (deepseek-ai/DualPipe). It has two streams of micro-batches,
/// which are phases 0 and 1 of the published code; `place` says which chunk and micro-batch the n-th of a
/// stream is.
template <class Place>
class DualPipeWriter {
 public:
  explicit DualPipeWriter(const Place& place) : place_(place) {}

  void forward(std::uint32_t stream) {
    const auto [chunk, micro_batch] = place_(stream, forwards_[stream]++);
    actions_.forward(chunk, micro_batch);
  }
  void backward(std::uint32_t stream) {
    const auto [chunk, micro_batch] = place_(stream, backwards_[stream]++);
    actions_.backward(chunk, micro_batch);
  }
  void input(std::uint32_t stream) {
    const auto [chunk, micro_batch] = place_(stream, backwards_[stream]++);
    actions_.input(chunk, micro_batch);
    waiting_.push_back({chunk, micro_batch});
  }
  void weight() {
    if (waiting_.empty()) return;
    actions_.weight(waiting_.front().first, waiting_.front().second);
    waiting_.pop_front();
  }
  std::vector<PipelineAction> take() {
    while (!waiting_.empty()) weight();
    return actions_.take();
  }

 private:
  const Place& place_;
  PipelineActions actions_;
  std::uint32_t forwards_[2] = {};
  std::uint32_t backwards_[2] = {};
  std::deque<std::pair<std::uint32_t, std::uint32_t>> waiting_;  ///< chunks and micro-batches that need a W
};

/// `rank` of `ranks` that a stream passes one way; `each` micro-batches in each stream.
template <class Place>
std::vector<PipelineAction> dual_actions(std::uint32_t rank, std::uint32_t ranks, std::uint32_t each,
                                         const Place& place) {
  DualPipeWriter<Place> write(place);
  const std::uint32_t later = ranks - rank - 1;
  for (std::uint32_t i = 0; i < 2 * later; ++i) write.forward(0);
  for (std::uint32_t i = 0; i <= rank; ++i) {
    write.forward(0);
    write.forward(1);
  }
  for (std::uint32_t i = 0; i < later; ++i) {
    write.input(1);
    write.weight();
    write.forward(1);
  }
  for (std::uint32_t i = 0; i < each - 2 * ranks + rank + 1; ++i) {
    write.forward(0);
    write.backward(1);
    write.forward(1);
    write.backward(0);
  }
  for (std::uint32_t i = 0; i < later; ++i) {
    write.backward(1);
    write.forward(1);
    write.backward(0);
  }
  // From the middle of this phase on, backward passes are split.
  const std::uint32_t middle = (rank + 1) / 2;
  for (std::uint32_t i = 0; i <= rank; ++i) {
    const bool splits_1 = i > middle || (i == middle && rank % 2 == 1);
    const bool splits_0 = i >= middle;
    splits_1 ? write.input(1) : write.backward(1);
    splits_0 ? write.input(0) : write.backward(0);
  }
  for (std::uint32_t i = 0; i < later; ++i) {
    write.weight();
    write.input(0);
  }
  return write.take();
}

}  // namespace

// Units of as many micro-batches as there are ranks; within one, with F and B of one slot each, the j-th of a
// direction runs chunk c forward in slot 2 j + c and backward in slot 2 j + 2 S - 1 - c (section 3.1).
PipelineSchedule chimera(const PipelineShape& shape) {
  const std::uint32_t ranks = shape.ranks;
  PipelineSchedule schedule{"", shape.micro_batches, both_ways(ranks), {}};
  using Slot = std::pair<std::uint64_t, PipelineAction>;
  std::vector<std::vector<Slot>> slots(ranks);
  for (std::uint32_t m = 0; m < shape.micro_batches; ++m) {
    const std::uint64_t begin = std::uint64_t{m / ranks} * 2 * ranks + 2 * (m % ranks / 2);
    for (std::uint32_t chunk = 0; chunk < ranks; ++chunk) {
      std::vector<Slot>& of_rank = slots[schedule.rank(chunk, m)];
      of_rank.push_back({begin + chunk, {PipelineAction::Kind::kForward, chunk, m}});
      of_rank.push_back({begin + 2 * ranks - 1 - chunk, {PipelineAction::Kind::kBackward, chunk, m}});
    }
  }
  for (std::vector<Slot>& of_rank : slots) {
    std::sort(of_rank.begin(), of_rank.end(), [](const Slot& a, const Slot& b) { return a.first < b.first; });
    std::vector<PipelineAction>& actions = schedule.actions.emplace_back();
    for (const auto& [slot, action] : of_rank) actions.push_back(action);
  }
  return schedule;
}

PipelineSchedule dualpipe(const PipelineShape& shape) {
  PipelineSchedule schedule{"", shape.micro_batches, both_ways(shape.ranks), {}};
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const bool is_second_half = rank >= shape.ranks / 2;
    // Stream 0 of a rank is the direction in which it comes early.
    const auto place = [&](std::uint32_t stream, std::uint32_t number) {
      const std::uint32_t direction = is_second_half ? 1 - stream : stream;
      return std::pair{direction == 0 ? rank : shape.ranks - 1 - rank, 2 * number + direction};
    };
    schedule.actions.push_back(dual_actions(std::min(rank, shape.ranks - 1 - rank), shape.ranks / 2,
                                            shape.micro_batches / 2, place));
  }
  return schedule;
}

PipelineSchedule dualpipev(const PipelineShape& shape) {
  PipelineSchedule schedule{"", shape.micro_batches, {v_placement(shape.ranks)}, {}};
  for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
    const auto place = [&](std::uint32_t stream, std::uint32_t number) {
      return std::pair{stream == 0 ? rank : 2 * shape.ranks - 1 - rank, number};
    };
    schedule.actions.push_back(dual_actions(rank, shape.ranks, shape.micro_batches, place));
  }
  return schedule;
}

}  // namespace reef
