#include "pipeline/division_search.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace reef {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::size_t kMostParts = 30'000;

}  // namespace

DivisionSearch::DivisionSearch(PipelineObjective objective, const PiecePrices& prices,
                               std::uint32_t micro_batches, std::uint32_t most_ranks)
    : objective_(objective), prices_(prices), micro_batches_(micro_batches), most_ranks_(most_ranks) {
  find_least();
}

std::vector<PipelineDivision> DivisionSearch::best(std::size_t count) {
  std::vector<PipelineDivision> found;
  open_.push({});
  while (!open_.empty() && found.size() < count) {
    const Part next = open_.top();
    open_.pop();
    if (is_whole(next)) {
      found.push_back(next.division);
      found.back().seconds = next.at_least;
    } else {
      extend(next);
    }
  }
  return found;
}

template <class Visit>
void DivisionSearch::for_each_chunk(std::uint32_t place, std::uint32_t begin, const Visit& visit) const {
  const std::uint32_t left = prices_.places() - place;
  for (std::uint32_t ranks = 1; ranks <= std::min(most_ranks_, left); ++ranks) {
    if (ranks == left) {
      if (begin < prices_.stages()) visit(ranks, prices_.stages());
      continue;
    }
    for (std::uint32_t end = begin + 1; end < prices_.stages(); ++end) visit(ranks, end);
  }
}

void DivisionSearch::find_least() {
  const std::uint32_t stages = prices_.stages(), places = prices_.places();
  least_.assign(std::size_t{places + 1} * (stages + 1), {kNever, kNever});
  least(places, stages) = {};
  for (std::uint32_t place = places; place-- > 0;) {
    for (std::uint32_t begin = place == 0 ? 0 : 1; begin < stages; ++begin) {
      PipelineValue& best = least(place, begin);
      for_each_chunk(place, begin, [&](std::uint32_t ranks, std::uint32_t end) {
        const PipelineValue alone =
            with(objective_, {}, prices_.piece(place, ranks, begin, end), micro_batches_);
        const PipelineValue both = joined(objective_, alone, least(place + ranks, end));
        best = {std::min(best.sum, both.sum), std::min(best.most, both.most)};
      });
    }
  }
}

DivisionSearch::Part DivisionSearch::extended(const Part& from, std::uint32_t ranks, std::uint32_t end) {
  Part next = from;
  next.value =
      with(objective_, from.value, prices_.piece(from.place, ranks, from.begin, end), micro_batches_);
  next.division.ranks_per_chunk.push_back(ranks);
  next.place += ranks;
  next.begin = end;
  if (!is_whole(next)) next.division.cuts.push_back(end);
  next.at_least = seconds_of(objective_, joined(objective_, next.value, least(next.place, end)));
  return next;
}

void DivisionSearch::extend(const Part& from) {
  const bool is_full = open_.size() > kMostParts;
  Part best{kNever, {}, {}, 0, 0};
  for_each_chunk(from.place, from.begin, [&](std::uint32_t ranks, std::uint32_t end) {
    if (least(from.place + ranks, end).sum == kNever) return;  // too few stages are left
    Part next = extended(from, ranks, end);
    if (!is_full) {
      open_.push(std::move(next));
    } else if (next.at_least < best.at_least) {
      best = std::move(next);
    }
  });
  if (best.at_least < kNever) open_.push(std::move(best));
}

}  // namespace reef
