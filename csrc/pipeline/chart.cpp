#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "reef/bytes.h"
#include "reef/pipeline_simulation.h"
#include "timeline/axis.h"
#include "timeline/svg.h"

namespace reef {
namespace {

constexpr double kEdge = 20, kLeft = 74, kRight = 940, kTop = 72, kRow = 30, kGap = 6, kWidth = 960;

struct Shade {
  const char* name;
  std::array<const char*, 2> colours;  ///< of a rank's first chunk, and of its later ones
};
/// By PipelineAction::Kind, in the colours of the other pictures.
constexpr std::array<Shade, 5> kShades{{{"forward", {"#99ddff", "#77aadd"}},
                                        {"backward", {"#ffbb99", "#ee8866"}},
                                        {"gradient of the input", {"#ffbb99", "#ee8866"}},
                                        {"gradients of weights", {"#bbe5c8", "#44bb99"}},
                                        {"update", {"#eedd88", "#eedd88"}}}};

struct Picture {
  const PipelineSchedule& schedule;
  const PipelineCost cost;

  double x(double seconds) const {
    return cost.makespan_seconds > 0 ? kLeft + seconds / cost.makespan_seconds * (kRight - kLeft) : kLeft;
  }
  double y(std::uint32_t rank) const { return kTop + rank * (kRow + kGap); }
  double bottom() const { return y(schedule.ranks()); }
};

/// Whether a rank has a chunk that comes earlier in the model, for micro-batches of the same direction or
/// another.
bool is_later_chunk(const PipelineSchedule& schedule, const PipelineAction& action, std::uint32_t rank) {
  for (const std::vector<std::uint32_t>& rank_of : schedule.rank_of) {
    for (std::uint32_t chunk = 0; chunk < action.chunk; ++chunk) {
      if (rank_of[chunk] == rank) return true;
    }
  }
  return false;
}

std::string bar(const Picture& picture, std::uint32_t rank, std::size_t index) {
  const PipelineAction& action = picture.schedule.actions[rank][index];
  const double x = picture.x(picture.cost.begin_seconds[rank][index]);
  const double width = picture.x(picture.cost.end_seconds[rank][index]) - x;
  const std::size_t later = is_later_chunk(picture.schedule, action, rank) ? 1 : 0;
  std::string drawn = element("rect",
                              {{"x", x},
                               {"y", picture.y(rank)},
                               {"width", std::max(0.6, width)},
                               {"height", kRow},
                               {"fill", kShades[static_cast<std::size_t>(action.kind)].colours[later]},
                               {"stroke", "#fff"},
                               {"stroke-width", 0.5}},
                              element("title", {}, xml_text(action.text())));
  const std::string number = std::to_string(action.micro_batch);
  if (width_of(decode_utf8(number), kTextPixels) + 2 <= width)
    drawn += label(x + width / 2, picture.y(rank) + kRow / 2 + 4, "middle", number);
  return drawn;
}

std::string rows(const Picture& picture) {
  std::string drawn;
  for (std::uint32_t rank = 0; rank < picture.schedule.ranks(); ++rank) {
    drawn += label(kLeft - 8, picture.y(rank) + kRow / 2 + 4, "end", "rank " + std::to_string(rank));
    drawn += line(kLeft, picture.y(rank) + kRow, kRight, picture.y(rank) + kRow, kHair);
    for (std::size_t i = 0; i < picture.schedule.actions[rank].size(); ++i) drawn += bar(picture, rank, i);
  }
  return drawn;
}

std::string axis(const Picture& picture) {
  std::string drawn = line(kLeft, picture.bottom(), kRight, picture.bottom(), kRule);
  const double nanoseconds = std::max(picture.cost.makespan_seconds * 1e9, 1.0);
  const Axis time = axis_up_to(nanoseconds, 12, kTimeUnits);
  for (int mark = 0; mark * time.step <= nanoseconds * (1 + 1e-9); ++mark) {
    const double x = picture.x(mark * time.step / 1e9);
    drawn += line(x, picture.bottom(), x, picture.bottom() + 4, kRule) +
             label(x, picture.bottom() + 18, "middle", time.label(mark));
  }
  return drawn;
}

std::string legend(const Picture& picture, double y) {
  std::array<bool, kShades.size()> is_used{};
  for (const std::vector<PipelineAction>& actions : picture.schedule.actions) {
    for (const PipelineAction& action : actions) is_used[static_cast<std::size_t>(action.kind)] = true;
  }
  std::string drawn;
  double x = kLeft;
  for (std::size_t kind = 0; kind < kShades.size(); ++kind) {
    if (!is_used[kind]) continue;
    drawn += element("rect", {{"x", x},
                              {"y", y - 10},
                              {"width", 12},
                              {"height", 12},
                              {"rx", 2},
                              {"fill", kShades[kind].colours.front()}});
    drawn += label(x + 18, y, "start", kShades[kind].name);
    x += 18 + width_of(decode_utf8(kShades[kind].name), kTextPixels) + 16;
  }
  return drawn;
}

std::string sentence(const Picture& picture) {
  std::uint64_t peak = 0;
  for (const PipelineRankCost& rank : picture.cost.ranks) peak = std::max(peak, rank.peak_bytes);
  return picture.schedule.name + "  ·  " + std::to_string(picture.schedule.micro_batches) +
         " micro-batches  ·  " + duration(picture.cost.makespan_seconds * 1e9) + ", idle " +
         fixed(100 * picture.cost.idle_share(), 1) + " %" +
         (peak > 0 ? "  ·  at most " + format_bytes(static_cast<std::int64_t>(peak)) + " on a rank" : "");
}

}  // namespace

std::string pipeline_chart(const PipelineCosts& costs, const PipelineSchedule& schedule,
                           const std::string& title) {
  const Picture picture{schedule, simulate(costs, schedule)};
  const double legend_y = picture.bottom() + 44;
  return picture_of(
      kWidth, legend_y + kEdge, title, sentence(picture),
      element("text", {{"x", kEdge}, {"y", 30}, {"font-size", kTitlePixels}, {"font-weight", "600"}},
              xml_text(fitted(title, kWidth - 2 * kEdge, kTitlePixels))) +
          label(kEdge, 50, "start", fitted(sentence(picture), kWidth - 2 * kEdge, kTextPixels), "400",
                kMuted) +
          rows(picture) + axis(picture) + legend(picture, legend_y));
}

}  // namespace reef
