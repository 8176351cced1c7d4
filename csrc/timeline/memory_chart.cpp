#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/timeline.h"
#include "timeline/axis.h"
#include "timeline/columns.h"
#include "timeline/replay.h"
#include "timeline/svg.h"

namespace reef {
namespace {

struct Band {
  Category category;
  const char* colour;
};
/// From the ground up, what stays longest first, so that the bands above it rest on level ground. The colours
/// are Paul Tol's "light" set, made for areas and told apart with every kind of colour blindness; red is the
/// budget's.
constexpr std::array<Band, kCategories> kStack{{{Category::kParameter, "#77aadd"},
                                                {Category::kOptimizerState, "#44bb99"},
                                                {Category::kGradient, "#eedd88"},
                                                {Category::kActivation, "#99ddff"},
                                                {Category::kCommunication, "#ffaabb"},
                                                {Category::kOther, "#cccccc"}}};
constexpr int kEdge = 20;          // around everything
constexpr int kLeft = 74;          // room for "1000 MiB"
constexpr int kLegendWidth = 304;  // room for "communication buffer  1.25 GiB  100 %"
constexpr int kShareWidth = 52;    // room for "  100 %"
constexpr int kTop = 88;           // title, subtitle, the peak's label
constexpr int kBottom = 34;        // labels of time
constexpr int kHeadroom = 22;      // the budget's label fits above its line
constexpr int kRow = 21;

struct Picture {
  const Timeline& timeline;
  std::size_t device;
  const ChartOptions& options;
  TimelinePeak peak;
  std::int64_t changes;  // on this device
  CategoryBytes ever;    // nonzero: the category held bytes at some time
  double nanoseconds;    // that the width of the plot stands for
  double top_bytes;      // that its height stands for
  int right;             // edges of the plot
  int bottom;

  double x(double at) const { return kLeft + at / nanoseconds * (right - kLeft); }
  double y(double bytes) const { return bottom - bytes / top_bytes * (bottom - kTop); }
};

Picture lay_out(const Timeline& timeline, std::size_t device, const ChartOptions& options) {
  const int right = options.width - kLegendWidth;
  const int bottom = options.height - kBottom;
  Picture picture{timeline, device, options, peak_of(timeline, device), 0, timeline.start[device], 0,
                  0,        right,  bottom};
  std::int64_t last = std::max<std::int64_t>(timeline.duration_nanoseconds, 1);
  for (const TimelineEvent& event : timeline.events) {
    last = std::max(last, event.nanoseconds);
    if (event.device != device) continue;
    ++picture.changes;
    picture.ever[event.category] = 1;
  }
  picture.nanoseconds = static_cast<double>(last);
  const std::int64_t largest = std::max({picture.peak.bytes.total(), options.budget_bytes, std::int64_t{1}});
  const double height = bottom - kTop;
  picture.top_bytes = static_cast<double>(largest) * height / (height - kHeadroom);
  return picture;
}

std::string percent(std::int64_t part, std::int64_t whole) {
  if (part == 0 || whole == 0) return "0 %";
  const double share = 100.0 * static_cast<double>(part) / static_cast<double>(whole);
  return share < 0.5 ? "<1 %" : fixed(share, 0) + " %";
}

std::string grouped(std::int64_t count) {
  std::string digits = std::to_string(count);
  for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, ",");
  return digits;
}

std::string peak_sentence(const Picture& picture) {
  return "peak " + format_bytes(picture.peak.bytes.total()) + " " + place_of(picture.timeline, picture.peak);
}

std::string header(const Picture& picture) {
  const double room = picture.options.width - 2 * kEdge;
  std::string about = picture.timeline.devices[picture.device] + "  ·  " + duration(picture.nanoseconds) +
                      "  ·  " + grouped(picture.changes) + " changes";
  if (picture.timeline.events_dropped > 0) {
    about += "  ·  then the recording was full, " + grouped(picture.timeline.events_dropped) +
             " changes are missing";
  }
  return element("text", {{"x", kEdge}, {"y", 30}, {"font-size", kTitlePixels}, {"font-weight", "600"}},
                 xml_text(fitted(picture.options.title, room, kTitlePixels))) +
         label(kEdge, 50, "start", fitted(about, room, kTextPixels), "400", kMuted);
}

/// The outline of everything up to and including `band`: a staircase, one step a pixel at most.
std::string outline(const Picture& picture, const std::vector<CategoryBytes>& columns, std::size_t band) {
  std::string path = "M" + std::to_string(kLeft) + " " + std::to_string(picture.bottom);
  std::string edge;
  for (std::size_t column = 0; column < columns.size(); ++column) {
    double sum = 0;
    for (std::size_t i = 0; i <= band; ++i) sum += static_cast<double>(columns[column][kStack[i].category]);
    std::string here = tenths(picture.y(sum));
    if (here == edge) continue;
    path += "H" + std::to_string(kLeft + static_cast<int>(column)) + "V" + here;
    edge = std::move(here);
  }
  return path + "H" + std::to_string(picture.right) + "V" + std::to_string(picture.bottom) + "Z";
}

/// From the widest sum to the narrowest, each over the last: no seams between bands.
std::string bands(const Picture& picture) {
  const std::vector<CategoryBytes> columns = largest_per_column(
      picture.timeline, picture.device, static_cast<std::size_t>(picture.right - kLeft), picture.nanoseconds);
  std::string drawn;
  for (std::size_t band = kStack.size(); band-- > 0;) {
    const Category category = kStack[band].category;
    if (picture.ever[category] == 0) continue;
    const std::int64_t bytes = picture.peak.bytes[category];
    const std::string tip = std::string(name(category)) + ": " + format_bytes(bytes) + " at the peak, " +
                            percent(bytes, picture.peak.bytes.total());
    drawn += element("path", {{"fill", kStack[band].colour}, {"d", outline(picture, columns, band)}},
                     element("title", {}, xml_text(tip)));
  }
  return drawn;
}

std::string axes(const Picture& picture) {
  std::string drawn;
  const Axis bytes = axis_up_to(picture.top_bytes, std::max(2, (picture.bottom - kTop) / 48), kByteUnits);
  for (int mark = 0; mark * bytes.step <= picture.top_bytes; ++mark) {
    const double y = picture.y(mark * bytes.step);
    if (mark > 0) drawn += line(kLeft, y, picture.right, y, "rgba(0,0,0,0.12)");
    drawn += label(kLeft - 8, y + 4, "end", bytes.label(mark));
  }
  const Axis time = axis_up_to(picture.nanoseconds, std::max(2, (picture.right - kLeft) / 64), kTimeUnits);
  for (int mark = 0; mark * time.step <= picture.nanoseconds * (1 + 1e-9); ++mark) {
    const double x = picture.x(mark * time.step);
    drawn += line(x, picture.bottom, x, picture.bottom + 4, kRule);
    drawn += label(x, picture.bottom + 18, "middle", time.label(mark));
  }
  return drawn + line(kLeft, picture.bottom, picture.right, picture.bottom, kRule);
}

std::string budget_line(const Picture& picture) {
  if (picture.options.budget_bytes <= 0) return "";
  const double y = picture.y(static_cast<double>(picture.options.budget_bytes));
  const double peak_x = picture.x(static_cast<double>(time_of(picture.timeline, picture.peak)));
  const bool peak_is_left = peak_x < (kLeft + picture.right) / 2.0;
  const std::string words = xml_text("budget " + format_bytes(picture.options.budget_bytes));
  return line(kLeft, y, picture.right, y, kRed) +
         element("text",
                 {{"x", peak_is_left ? picture.right - 6.0 : kLeft + 6.0},
                  {"y", y - 6},
                  {"text-anchor", peak_is_left ? "end" : "start"},
                  {"font-weight", "600"},
                  {"fill", kRed},
                  {"stroke", "#fff"},
                  {"stroke-width", 3},
                  {"stroke-linejoin", "round"},
                  {"paint-order", "stroke"}},
                 words);
}

/// The label stands above the plot, where nothing else is, as near to its line as the picture allows.
std::string peak_mark(const Picture& picture) {
  const double at = static_cast<double>(time_of(picture.timeline, picture.peak));
  const double x = std::min(std::floor(picture.x(at)), picture.right - 1.0) + 0.5;
  const double y = picture.y(static_cast<double>(picture.peak.bytes.total()));
  const double room = picture.options.width - 2 * kEdge;
  const std::string words = fitted(peak_sentence(picture), room, kTextPixels);
  const double half = std::min(width_of(decode_utf8(words), kTextPixels), room) / 2;
  const double middle = std::clamp(x, kEdge + half, picture.options.width - kEdge - half);
  return element(
      "g", {},
      element("title", {}, xml_text(peak_sentence(picture) + ", after " + duration(at))) +
          line(x, kTop - 6, x, picture.bottom, kInk, "3 3") +
          element("circle", {{"cx", x}, {"cy", y}, {"r", 3.5}, {"fill", "#fff"}, {"stroke", kInk}}) +
          label(middle, kTop - 12, "middle", words, "600"));
}

/// The categories that ever held bytes, in the order of the stack, with their part of the peak.
std::string legend(const Picture& picture) {
  const double left = picture.right + kEdge;
  const double right = picture.options.width - kEdge;
  const std::int64_t total = picture.peak.bytes.total();
  double y = kTop + 8;
  const auto row = [&](std::string_view words, std::int64_t bytes, std::string_view weight) {
    return label(left + 20, y, "start", words, weight) +
           label(right - kShareWidth, y, "end", format_bytes(bytes), weight) +
           label(right, y, "end", percent(bytes, total), weight);
  };
  std::string drawn = label(right - kShareWidth, y, "end", "at the peak", "400", kMuted);
  for (auto band = kStack.rbegin(); band != kStack.rend(); ++band) {
    if (picture.ever[band->category] == 0) continue;
    y += kRow;
    drawn += element(
        "rect",
        {{"x", left}, {"y", y - 10}, {"width", 12}, {"height", 12}, {"rx", 2}, {"fill", band->colour}});
    drawn += row(name(band->category), picture.peak.bytes[band->category], "400");
  }
  drawn += line(left, y + 8, right, y + 8, kHair);
  y += kRow + 3;
  return drawn + row("total", total, "600");
}

std::string description(const Picture& picture) {
  std::string words = "Bytes alive on " + picture.timeline.devices[picture.device] + " over " +
                      duration(picture.nanoseconds) + ": " + peak_sentence(picture);
  for (const Band& band : kStack) {
    const std::int64_t bytes = picture.peak.bytes[band.category];
    if (bytes != 0) words += std::string(", ") + name(band.category) + " " + format_bytes(bytes);
  }
  if (picture.options.budget_bytes > 0) words += "; budget " + format_bytes(picture.options.budget_bytes);
  return words;
}

}  // namespace

std::string memory_chart(const Timeline& timeline, std::size_t device, const ChartOptions& options) {
  check_device(timeline, device);
  const auto holds = [](int pixels, int least) { return pixels >= least && pixels <= 16384; };
  if (!holds(options.width, 560) || !holds(options.height, 300)) {
    throw ConfigError(
        "memory_chart: " + std::to_string(options.width) + " x " + std::to_string(options.height) +
        " pixels cannot hold the chart; choose a width from 560 to 16384 and a height from 300 to 16384");
  }
  const Picture picture = lay_out(timeline, device, options);
  const double width = options.width;
  const double height = options.height;
  return picture_of(width, height, options.title, description(picture),
                    header(picture) + bands(picture) + axes(picture) + budget_line(picture) +
                        peak_mark(picture) + legend(picture));
}

}  // namespace reef
