#include "pipeline/objective.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "pipeline/traffic.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::to_string;

/// The number of ranks that a profile is of. Throws ConfigError if chunks are placed on others.
std::size_t ranks_of(const PipelineProfile& profile, std::span<const std::uint32_t> rank_of) {
  const std::size_t placed = std::size_t{*std::max_element(rank_of.begin(), rank_of.end())} + 1;
  std::size_t ranks = placed;
  if (!profile.speeds.empty()) {
    ranks = profile.speeds.size();
  } else if (profile.links.size() > 1) {
    ranks = static_cast<std::size_t>(std::lround(std::sqrt(static_cast<double>(profile.links.size()))));
  }
  if (placed > ranks)
    throw ConfigError("PipelineProfile: a chunk is on rank " + to_string(placed - 1) +
                      ", and the profile has speeds or links of " + to_string(ranks) + " ranks");
  return ranks;
}

}  // namespace

PipelineValue with(PipelineObjective objective, PipelineValue value, const PipelinePiece& piece,
                   std::uint32_t micro_batches) {
  const double repeated = micro_batches - 1.0;
  switch (objective) {
    case PipelineObjective::kPipeDream:
      value.most = std::max(
          {value.most, piece.seconds() / piece.ranks, 2 * piece.behind, piece.reduction / micro_batches});
      return value;
    case PipelineObjective::kPipeTorch:
      value.most =
          std::max(value.most, (piece.seconds() + 2 * piece.before + 2 * piece.behind) / piece.ranks);
      return value;
    case PipelineObjective::kDapple: {  // a message is a chunk of its own
      const double seconds = piece.seconds() / piece.ranks;
      value.end = std::max(value.end, piece.reduction - value.backward);
      value.backward += piece.backward / piece.ranks + piece.behind;
      value.sum += seconds;
      value.most = std::max(value.most, value.sum + repeated * seconds);
      value.sum += 2 * piece.behind;
      value.most = std::max(value.most, value.sum + repeated * 2 * piece.behind);
      return value;
    }
    case PipelineObjective::kSumAndMax: {
      const std::uint32_t of_a_rank = (micro_batches + piece.ranks - 1) / piece.ranks;
      value.sum += piece.seconds() + 2 * piece.behind;
      value.most = std::max(value.most, (of_a_rank - 1.0) * piece.seconds());
      value.end = std::max(value.end, piece.reduction);
      return value;
    }
  }
  return value;
}

PipelineValue joined(PipelineObjective objective, const PipelineValue& first, const PipelineValue& rest) {
  const double before = objective == PipelineObjective::kDapple ? first.sum : 0;
  return {first.sum + rest.sum, std::max(first.most, before + rest.most), 0, first.end};
}

double seconds_of(PipelineObjective objective, const PipelineValue& value) {
  return (objective == PipelineObjective::kSumAndMax ? value.sum : 0) + value.most + value.end;
}

PiecePrices::PiecePrices(const PipelineProfile& profile, std::span<const std::uint32_t> rank_of)
    : profile_(profile),
      rank_of_(rank_of),
      all_ranks_(ranks_of(profile, rank_of)),
      forward_until_(1),
      backward_until_(1),
      gradient_bytes_until_(1) {
  check_costs({profile.stages, profile.speeds, profile.links}, all_ranks_);
  for (const PipelineChunkCost& stage : profile.stages) {
    forward_until_.push_back(forward_until_.back() + stage.forward_seconds);
    backward_until_.push_back(backward_until_.back() + stage.input_seconds + stage.weight_seconds);
    gradient_bytes_until_.push_back(gradient_bytes_until_.back() + stage.gradient_bytes);
  }
}

PipelinePiece PiecePrices::piece(std::uint32_t place, std::uint32_t ranks, std::uint32_t begin,
                                 std::uint32_t end) const {
  const std::span<const std::uint32_t> own = rank_of_.subspan(place, ranks);
  double speed = 1;
  if (!profile_.speeds.empty()) {
    speed = profile_.speeds[own.front()];
    for (const std::uint32_t rank : own) speed = std::min(speed, profile_.speeds[rank]);
  }
  PipelinePiece piece;
  piece.ranks = ranks;
  piece.forward = (forward_until_[end] - forward_until_[begin]) / speed;
  piece.backward = (backward_until_[end] - backward_until_[begin]) / speed;
  if (place > 0) piece.before = message_seconds(place, begin);
  if (place + ranks < places()) piece.behind = message_seconds(place + ranks, end);
  if (ranks == 1) return piece;
  const std::uint64_t bytes = gradient_bytes_until_[end] - gradient_bytes_until_[begin];
  for (const std::uint32_t rank : own)
    piece.reduction =
        std::max(piece.reduction, reduction_seconds(profile_.links, all_ranks_, own, rank, bytes));
  return piece;
}

double PiecePrices::message_seconds(std::uint32_t place, std::uint32_t cut) const {
  const std::uint32_t from = rank_of_[place - 1], to = rank_of_[place];
  if (from == to) return 0;
  return reef::message_seconds(link_between(profile_.links, all_ranks_, from, to),
                               profile_.stages[cut - 1].output_bytes);
}

}  // namespace reef
