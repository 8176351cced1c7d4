#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "reef/bytes.h"
#include "reef/schedule.h"
#include "timeline/axis.h"
#include "timeline/svg.h"

namespace reef {
namespace {

using Kind = ScheduleOp::Kind;

constexpr double kEdge = 20, kLeft = 74, kRight = 940, kTop = 88, kGround = 330, kRowsTop = 372, kWidth = 960;

struct Band {
  const char* name;
  const char* colour;
  std::uint64_t ScheduleLoad::*bytes;
};
/// From the ground up, in the colours of memory_chart.cpp.
constexpr std::array<Band, 4> kBands{{{"gradients", "#eedd88", &ScheduleLoad::gradient_bytes},
                                      {"kept outputs", "#77aadd", &ScheduleLoad::output_bytes},
                                      {"tapes", "#99ddff", &ScheduleLoad::tape_bytes},
                                      {"at work", "#cccccc", &ScheduleLoad::working_bytes}}};

struct Shade {
  Kind kind;
  const char* name;
  const char* colour;
};
constexpr std::array<Shade, 4> kShades{{{Kind::kForward, "forward", "#77aadd"},
                                        {Kind::kTaped, "forward, tape kept", "#44bb99"},
                                        {Kind::kRetape, "tape made anew", "#eedd88"},
                                        {Kind::kBackward, "backward", "#ee8866"}}};
/// In the lower half of a stage's row.
constexpr std::array<Shade, 4> kCopies{{{Kind::kOffloadOutput, "to the tier", "#aa4499"},
                                        {Kind::kOffloadTape, nullptr, "#aa4499"},
                                        {Kind::kPrefetchOutput, "and back", "#117733"},
                                        {Kind::kPrefetchTape, nullptr, "#117733"}}};
bool is_copy(Kind kind) {
  return std::any_of(kCopies.begin(), kCopies.end(), [&](const Shade& shade) { return shade.kind == kind; });
}

struct Picture {
  const Schedule& schedule;
  ScheduleCost cost;
  double top_bytes;
  double row;  ///< its height

  double x(double seconds) const {
    return cost.seconds > 0 ? kLeft + seconds / cost.seconds * (kRight - kLeft) : kLeft;
  }
  double y(double bytes) const { return kGround - bytes / top_bytes * (kGround - kTop); }
  double bottom() const { return kRowsTop + row * schedule.stages; }
};

std::string bands(const Picture& picture) {
  std::string drawn;
  for (std::size_t band = kBands.size(); band-- > 0;) {  // each over the wider sum behind it
    std::string path = "M" + tenths(kLeft) + " " + tenths(kGround);
    for (std::size_t op = 0; op < picture.cost.load.size(); ++op) {
      if (is_copy(picture.schedule.operations[op].kind)) continue;  // what follows has what it takes
      double sum = 0;
      for (std::size_t i = 0; i <= band; ++i)
        sum += static_cast<double>(picture.cost.load[op].*kBands[i].bytes);
      path += "H" + tenths(picture.x(picture.cost.begin_seconds[op])) + "V" + tenths(picture.y(sum));
    }
    path += "H" + tenths(kRight) + "V" + tenths(kGround) + "Z";
    drawn += element("path", {{"fill", kBands[band].colour}, {"d", path}},
                     element("title", {}, kBands[band].name));
  }
  return drawn;
}

std::string axes(const Picture& picture) {
  std::string drawn;
  const Axis bytes = axis_up_to(picture.top_bytes, 5, kByteUnits);
  for (int mark = 0; mark * bytes.step <= picture.top_bytes; ++mark) {
    const double y = picture.y(mark * bytes.step);
    if (mark > 0) drawn += line(kLeft, y, kRight, y, "rgba(0,0,0,0.12)");
    drawn += label(kLeft - 8, y + 4, "end", bytes.label(mark));
  }
  const double nanoseconds = std::max(picture.cost.seconds * 1e9, 1.0);
  const Axis time = axis_up_to(nanoseconds, 12, kTimeUnits);
  for (int mark = 0; mark * time.step <= nanoseconds * (1 + 1e-9); ++mark) {
    const double x = picture.x(mark * time.step / 1e9);
    drawn += line(x, kGround, x, kGround + 4, kRule) + label(x, kGround + 18, "middle", time.label(mark));
  }
  return drawn + line(kLeft, kGround, kRight, kGround, kRule);
}

// In its stage's row, as long as it takes.
std::string bar(const Picture& picture, std::size_t operation, const char* colour, double height) {
  const ScheduleOp& op = picture.schedule.operations[operation];
  const double x = picture.x(picture.cost.begin_seconds[operation]);
  return element("rect",
                 {{"x", x},
                  {"y", picture.bottom() - (op.stage - 1 + height) * picture.row},
                  {"width", std::max(0.6, picture.x(picture.cost.end_seconds[operation]) - x)},
                  {"height", height * picture.row},
                  {"fill", colour}},
                 element("title", {}, xml_text(Schedule{0, {op}}.text())));
}

// A row for each stage, the first at the bottom.
std::string rows(const Picture& picture) {
  std::string drawn, copies;
  for (std::size_t i = 0; i < picture.schedule.operations.size(); ++i) {
    const ScheduleOp& op = picture.schedule.operations[i];
    if (op.kind == Kind::kLoss) {
      const double x = picture.x(picture.cost.begin_seconds[i]);
      drawn += line(x, kTop, x, picture.bottom(), kMuted, "2 3");
    }
    for (const Shade& shade : kShades) {
      if (shade.kind == op.kind) drawn += bar(picture, i, shade.colour, 1);
    }
    for (const Shade& shade : kCopies) {
      if (shade.kind == op.kind) copies += bar(picture, i, shade.colour, 0.4);
    }
  }
  drawn += copies;  // over what runs beside them
  for (const std::uint32_t stage : {1U, picture.schedule.stages}) {
    drawn += label(kLeft - 8, picture.bottom() - (stage - 0.5) * picture.row + 4, "end",
                   "stage " + std::to_string(stage));
    if (picture.schedule.stages == 1) break;
  }
  return drawn + line(kLeft, picture.bottom(), kRight, picture.bottom(), kRule);
}

std::string legend(const Picture& picture, double y) {
  std::string drawn;
  double x = kLeft;
  const auto entry = [&](const char* name, const char* colour) {
    drawn += element("rect",
                     {{"x", x}, {"y", y - 10}, {"width", 12}, {"height", 12}, {"rx", 2}, {"fill", colour}});
    drawn += label(x + 18, y, "start", name);
    x += 18 + width_of(decode_utf8(name), kTextPixels) + 16;
  };
  for (const Band& band : kBands) entry(band.name, band.colour);
  x = kLeft;
  y += 21;
  for (const Shade& shade : kShades) entry(shade.name, shade.colour);
  for (const Shade& shade : kCopies) {
    if (shade.name != nullptr && picture.cost.offloaded_bytes > 0) entry(shade.name, shade.colour);
  }
  return drawn;
}

std::string marks(const Picture& picture, std::uint64_t budget_bytes) {
  std::string drawn;
  if (budget_bytes > 0) {
    const double y = picture.y(static_cast<double>(budget_bytes));
    drawn += line(kLeft, y, kRight, y, kRed) +
             label(kRight, y - 6, "end", "budget " + format_bytes(static_cast<std::int64_t>(budget_bytes)),
                   "600", kRed);
  }
  const double x = picture.x(picture.cost.begin_seconds[picture.cost.peak_operation]);
  const double y = picture.y(static_cast<double>(picture.cost.peak_bytes));
  return drawn + element("circle", {{"cx", x}, {"cy", y}, {"r", 3.5}, {"fill", "#fff"}, {"stroke", kInk}});
}

std::string sentence(const Picture& picture) {
  return std::to_string(picture.schedule.stages) + " stages  ·  " + duration(picture.cost.seconds * 1e9) +
         ", of it " + duration(picture.cost.recomputed_seconds * 1e9) + " computed once more" +
         (picture.cost.offloaded_bytes > 0
              ? ", " + duration(picture.cost.waited_seconds * 1e9) + " waited for transfers"
              : "") +
         "  ·  peak " + format_bytes(static_cast<std::int64_t>(picture.cost.peak_bytes)) + " at " +
         Schedule{0, {picture.schedule.operations[picture.cost.peak_operation]}}.text();
}

}  // namespace

std::string schedule_chart(const ChainProfile& profile, const Schedule& schedule, std::uint64_t budget_bytes,
                           const std::string& title) {
  Picture picture{schedule, simulate(profile, schedule), 1, 1};
  const std::uint64_t largest = std::max({picture.cost.peak_bytes, budget_bytes, std::uint64_t{1}});
  picture.top_bytes = static_cast<double>(largest) * 1.08;
  picture.row = std::clamp(220.0 / schedule.stages, 2.0, 14.0);
  const double legend_y = picture.bottom() + 28;
  return picture_of(
      kWidth, legend_y + 21 + kEdge, title, sentence(picture),
      element("text", {{"x", kEdge}, {"y", 30}, {"font-size", kTitlePixels}, {"font-weight", "600"}},
              xml_text(fitted(title, kWidth - 2 * kEdge, kTitlePixels))) +
          label(kEdge, 50, "start", fitted(sentence(picture), kWidth - 2 * kEdge, kTextPixels), "400",
                kMuted) +
          bands(picture) + axes(picture) + rows(picture) + marks(picture, budget_bytes) +
          legend(picture, legend_y));
}

}  // namespace reef
