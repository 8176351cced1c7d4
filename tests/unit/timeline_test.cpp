#include "reef/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <boost/json/src.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reef/bytes.h"
#include "reef/error.h"
#include "support/timelines.h"
#include "support/xml.h"
#include "timeline/axis.h"
#include "timeline/columns.h"
#include "timeline/svg.h"

namespace reef {
namespace {

using test::random_story;
using test::Story;

constexpr const char* kHostile = "op<\"'&>\x01\xff\xc3(\xe2\x82 end";

std::vector<Story> stories() {
  std::vector<Story> all;
  for (std::uint64_t seed = 0; seed < 40; ++seed) all.push_back(random_story(seed, 1 + seed % 3, seed * 7));
  return all;
}

TimelineEvent allocation(std::int64_t nanoseconds, std::int64_t bytes, std::int32_t op = -1) {
  TimelineEvent event;
  event.nanoseconds = nanoseconds;
  event.bytes = bytes;
  event.op = op;
  event.kind = bytes > 0 ? TimelineEvent::Kind::kAllocate : TimelineEvent::Kind::kFree;
  event.category = Category::kActivation;
  return event;
}

Timeline one_device(std::vector<TimelineEvent> events, std::int64_t duration) {
  Timeline timeline;
  timeline.devices = {"cpu"};
  timeline.start.resize(1);
  timeline.operators = {"aten::mm"};
  timeline.events = std::move(events);
  timeline.duration_nanoseconds = duration;
  return timeline;
}

bool mentions(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

TEST(Replay, EqualsTheBlocksAliveAfterEveryEvent) {
  for (const Story& story : stories()) {
    for (std::size_t device = 0; device < story.alive.size(); ++device) {
      for (std::size_t count = 0; count <= story.timeline.events.size(); ++count) {
        const CategoryBytes bytes = bytes_after(story.timeline, device, count);
        ASSERT_EQ(bytes, story.alive[device][count]);
        std::int64_t sum = 0;
        for (const std::int64_t part : bytes.of) {
          ASSERT_GE(part, 0);
          sum += part;
        }
        ASSERT_EQ(sum, bytes.total());
      }
    }
  }
}

TEST(Replay, PeakIsTheFirstLargestTotal) {
  for (const Story& story : stories()) {
    for (std::size_t device = 0; device < story.alive.size(); ++device) {
      const std::vector<CategoryBytes>& alive = story.alive[device];
      std::size_t first = 0;
      for (std::size_t i = 1; i < alive.size(); ++i) {
        if (alive[i].total() > alive[first].total()) first = i;
      }
      const TimelinePeak peak = peak_of(story.timeline, device);
      EXPECT_EQ(peak.event, static_cast<std::int64_t>(first) - 1);
      EXPECT_EQ(peak.bytes, alive[first]);
    }
  }
}

TEST(Replay, RefusesWhatIsNotThere) {
  const Timeline timeline = one_device({allocation(1, 8)}, 2);
  EXPECT_THROW(bytes_after(timeline, 1, 0), ConfigError);
  EXPECT_THROW(bytes_after(timeline, 0, 2), ConfigError);
  EXPECT_THROW(peak_of(timeline, 1), ConfigError);
  EXPECT_THROW(memory_chart(timeline, 1), ConfigError);
  EXPECT_THROW(peak_of({}, 0), ConfigError);
  Timeline stray = timeline;
  stray.events[0].device = 1;
  EXPECT_THROW(chrome_trace(stray), ConfigError);
}

TEST(ChromeTrace, CountersEqualTheReplayAtEveryEvent) {
  for (const Story& story : stories()) {
    const auto trace = boost::json::parse(chrome_trace(story.timeline)).as_object();
    EXPECT_EQ(trace.at("displayTimeUnit").as_string(), "ms");
    EXPECT_FALSE(trace.contains("otherData"));
    std::size_t counters = 0;
    std::size_t peaks = 0;
    for (const boost::json::value& value : trace.at("traceEvents").as_array()) {
      const boost::json::object& event = value.as_object();
      const boost::json::object& args = event.at("args").as_object();
      const std::string phase(event.at("ph").as_string());
      const auto device = static_cast<std::size_t>(event.at("tid").as_int64() - 1);
      const std::int64_t nanoseconds = std::llround(event.at("ts").as_double() * 1000);
      EXPECT_EQ(event.at("pid").as_int64(), 1);
      if (phase == "C") {
        // The start values of every device come first, then one counter per event.
        const bool start = counters < story.alive.size();
        const std::size_t index = start ? 0 : counters - story.alive.size();
        const std::size_t expected_device = start ? counters : story.timeline.events[index].device;
        ASSERT_EQ(device, expected_device);
        EXPECT_EQ(event.at("name").as_string(), "bytes alive (" + story.timeline.devices[device] + ")");
        EXPECT_EQ(nanoseconds, start ? 0 : story.timeline.events[index].nanoseconds);
        const CategoryBytes& alive = story.alive[device][start ? 0 : index + 1];
        std::size_t category = 0;
        for (const auto& [key, bytes] : args) {
          EXPECT_EQ(key, name(static_cast<Category>(category)));
          ASSERT_EQ(bytes.as_int64(), alive.of[category++]);
        }
        EXPECT_EQ(category, kCategories);
        ++counters;
      } else if (phase == "i") {
        const TimelinePeak peak = peak_of(story.timeline, device);
        const TimelineEvent* at =
            peak.event < 0 ? nullptr : &story.timeline.events[static_cast<std::size_t>(peak.event)];
        EXPECT_EQ(event.at("s").as_string(), "t");
        EXPECT_EQ(args.at("bytes").as_int64(), peak.bytes.total());
        EXPECT_EQ(nanoseconds, at == nullptr ? 0 : at->nanoseconds);
        const bool in_operator = at != nullptr && at->op >= 0;
        EXPECT_EQ(args.at("operator").as_string(),
                  in_operator ? story.timeline.operators[static_cast<std::size_t>(at->op)] : "");
        EXPECT_TRUE(mentions(event.at("name").as_string(), format_bytes(peak.bytes.total())));
        ++peaks;
      } else {
        EXPECT_EQ(phase, "M");
      }
    }
    EXPECT_EQ(counters, story.alive.size() + story.timeline.events.size());
    EXPECT_EQ(peaks, story.alive.size());
  }
}

TEST(ChromeTrace, ParsesWhateverTheNamesHold) {
  Timeline timeline = one_device({allocation(1'234'567, 1 << 20, 0)}, 2'000'000);
  timeline.devices[0] = timeline.operators[0] = kHostile;
  const boost::json::value trace = boost::json::parse(chrome_trace(timeline));
  const boost::json::object& peak = trace.at("traceEvents").as_array().back().as_object();
  EXPECT_EQ(peak.at("args").at("operator").as_string(), encode_utf8(decode_utf8(kHostile)));
  EXPECT_DOUBLE_EQ(peak.at("ts").as_double(), 1234.567);
}

TEST(ChromeTrace, SaysWhenTheRecordingWasFull) {
  Timeline timeline = one_device({}, 0);
  timeline.events_dropped = 7;
  const boost::json::value trace = boost::json::parse(chrome_trace(timeline));
  EXPECT_EQ(trace.at("otherData").at("events_dropped").as_int64(), 7);
}

TEST(ChromeTrace, ShowsEverySampleOfEveryCounter) {
  Timeline timeline = one_device({allocation(1, 8)}, 9);
  timeline.counters = {"bytes away (cpu)", kHostile};
  timeline.samples = {{1, 100, 0}, {2, -7, 1}, {5'000, 0, 0}};
  std::size_t found = 0;
  const boost::json::value trace = boost::json::parse(chrome_trace(timeline));
  for (const auto& value : trace.at("traceEvents").as_array()) {
    if (!value.at("args").as_object().contains("value")) continue;
    const TimelineSample& sample = timeline.samples[found++];
    EXPECT_EQ(value.at("ph").as_string(), "C");
    EXPECT_EQ(value.at("name").as_string(), encode_utf8(decode_utf8(timeline.counters[sample.counter])));
    EXPECT_EQ(std::llround(value.at("ts").as_double() * 1000), sample.nanoseconds);
    EXPECT_EQ(value.at("args").at("value").as_int64(), sample.value);
  }
  EXPECT_EQ(found, timeline.samples.size());
  timeline.samples.push_back({9, 1, 2});
  EXPECT_THROW(chrome_trace(timeline), ConfigError);
}

TEST(ChromeTrace, NamesReadBackAsTheyWere) {
  std::string every;
  for (int c = 0; c < 0x80; ++c) every += static_cast<char>(c);
  every += "\u00e9\u20ac\U0001F30A";
  Timeline timeline = one_device({allocation(1, 1, 0)}, 1);
  timeline.operators[0] = every;
  const boost::json::value trace = boost::json::parse(chrome_trace(timeline));
  EXPECT_EQ(trace.at("traceEvents").as_array().back().at("args").at("operator").as_string(), every);
}

TEST(Columns, HoldTheLargestStateAliveInThem) {
  for (Story story : stories()) {
    std::vector<TimelineEvent>& events = story.timeline.events;
    for (const std::size_t columns : {100, 7, 1}) {
      const auto count = static_cast<std::int64_t>(columns);
      const std::int64_t width = story.timeline.duration_nanoseconds / count + 1;
      if (story.timeline.devices.size() == 2) {  // every change on the edge of a column
        for (TimelineEvent& event : events) event.nanoseconds -= event.nanoseconds % width;
      }
      const auto found = largest_per_column(story.timeline, 0, columns, static_cast<double>(width * count));
      ASSERT_EQ(found.size(), columns);
      for (std::int64_t column = 0; column < count; ++column) {
        const std::int64_t begin = width * column;
        std::int64_t largest = 0;
        std::int64_t from = 0;
        for (std::size_t i = 0; i <= events.size(); ++i) {  // alive[i] ends with event i
          if (i < events.size() && events[i].device != 0) continue;
          const std::int64_t to = i == events.size() ? width * count : events[i].nanoseconds;
          const bool born_inside = from >= begin && from < begin + width;
          const bool carried_in = from < begin && to > begin;
          if (born_inside || carried_in) largest = std::max(largest, story.alive[0][i].total());
          from = to;
        }
        const CategoryBytes& shown = found[static_cast<std::size_t>(column)];
        ASSERT_EQ(shown.total(), largest) << "column " << column << " of " << columns;
        EXPECT_NE(std::find(story.alive[0].begin(), story.alive[0].end(), shown), story.alive[0].end());
      }
    }
  }
}

TEST(Axis, StepsAreRoundAndFew) {
  for (const int marks : {2, 5, 11}) {
    for (double top = 1; top < 1e19; top *= 1.137) {
      for (const Axis& axis : {axis_up_to(top, marks, kByteUnits), axis_up_to(top, marks, kTimeUnits)}) {
        const double steps = top / axis.step;
        EXPECT_LE(steps, marks + 1e-6) << top;
        // Never finer than one byte or nanosecond, else never coarser than 2.5 times what would do.
        EXPECT_GE(axis.step, 1);
        if (axis.step > 1) {
          EXPECT_GE(steps * 2.5, marks * (1 - 1e-6)) << top;
        }
        const double in_units = axis.step / axis.unit;
        const double leading = in_units / std::pow(10, std::floor(std::log10(in_units) + 1e-9));
        EXPECT_TRUE(std::abs(leading - 1) < 1e-9 || std::abs(leading - 2) < 1e-9 ||
                    std::abs(leading - 5) < 1e-9);
        // The label says exactly where the mark is.
        EXPECT_NEAR(std::stod(axis.label(3)), 3 * in_units, 1e-9 * in_units);
      }
    }
  }
  EXPECT_EQ(axis_up_to(0x1p30 * 2.2, 6, kByteUnits).label(1), "0.5 GiB");
  EXPECT_EQ(axis_up_to(0x1p20 * 1000, 6, kByteUnits).label(5), "1000 MiB");
  EXPECT_EQ(axis_up_to(329e6, 7, kTimeUnits).label(2), "100 ms");
  EXPECT_EQ(axis_up_to(1, 5, kTimeUnits).label(1), "1 ns");
}

TEST(XmlChecker, RefusesWhatIsNotWellFormed) {
  for (const char* bad : {"<a>", "<a></b>", "<a x=1/>", "<a x=\"1\" x=\"2\"/>", "<a>&</a>", "<a>&nope;</a>",
                          "<a/><b/>", "<a x=\"<\"/>", "<a>\x01</a>", ""}) {
    EXPECT_THROW(test::parse_xml(bad), std::runtime_error) << bad;
  }
  EXPECT_EQ(test::parse_xml("<a x=\"&lt;\"><b/>&amp;</a>")[0].text, "&");
}

TEST(MemoryChart, IsWellFormedAndTellsThePeak) {
  for (const Story& story : stories()) {
    for (std::size_t device = 0; device < story.alive.size(); ++device) {
      const std::string chart = memory_chart(story.timeline, device);
      const auto elements = test::parse_xml(chart);
      EXPECT_EQ(elements.front().name, "svg");
      EXPECT_EQ(elements[1].name, "title");
      EXPECT_EQ(elements[2].name, "desc");
      const TimelinePeak peak = peak_of(story.timeline, device);
      EXPECT_TRUE(mentions(chart, "peak " + format_bytes(peak.bytes.total())));
      const std::int32_t op =
          peak.event < 0 ? -1 : story.timeline.events[static_cast<std::size_t>(peak.event)].op;
      if (op >= 0) {
        EXPECT_TRUE(mentions(chart, "in " + story.timeline.operators[static_cast<std::size_t>(op)]));
      }
      for (std::size_t i = 0; i < kCategories; ++i) {
        if (peak.bytes.of[i] == 0) continue;
        EXPECT_TRUE(mentions(chart, std::string(name(static_cast<Category>(i))) + ": " +
                                        format_bytes(peak.bytes.of[i]) + " at the peak"));
      }
      EXPECT_FALSE(mentions(chart, "budget"));
    }
  }
}

TEST(MemoryChart, TheHighestPointOfTheDrawingIsThePeak) {
  for (const Story& story : stories()) {
    if (peak_of(story.timeline, 0).bytes.total() == 0) continue;
    double circle = 0;
    double highest = 1e9;
    for (const test::XmlElement& element : test::parse_xml(memory_chart(story.timeline, 0))) {
      if (element.name == "circle") circle = std::stod(element.attributes.at("cy"));
      if (element.name != "path") continue;
      const std::string& path = element.attributes.at("d");
      for (std::size_t at = path.find('V'); at != std::string::npos; at = path.find('V', at + 1)) {
        highest = std::min(highest, std::stod(path.substr(at + 1)));
      }
    }
    EXPECT_EQ(highest, circle);
  }
}

TEST(MemoryChart, EscapesAndShortensText) {
  Timeline timeline = one_device({allocation(10, 1 << 20, 0)}, 20);
  timeline.devices[0] = kHostile;
  timeline.operators[0] = std::string(kHostile) + std::string(5000, 'x');
  ChartOptions options;
  options.title = "<&> \"it's\" " + std::string(5000, 'y');
  const auto elements = test::parse_xml(memory_chart(timeline, 0, options));
  EXPECT_EQ(elements[1].text, options.title);
  for (const test::XmlElement& element : elements) {
    if (element.name == "text") {
      const double pixels = element.attributes.contains("font-size") ? 16 : 12;
      EXPECT_LE(width_of(decode_utf8(element.text), pixels), options.width) << element.text;
    }
    for (const char32_t point : decode_utf8(element.text)) EXPECT_TRUE(point >= 0x20 || point == '\n');
  }
}

TEST(MemoryChart, ShowsTheBudgetOnlyWhenAsked) {
  const Timeline timeline = one_device({allocation(10, 1 << 20, 0)}, 20);
  ChartOptions options;
  EXPECT_FALSE(mentions(memory_chart(timeline, 0, options), "budget"));
  for (const std::int64_t budget :
       {std::int64_t{1}, 1_MiB, 3_GiB, std::numeric_limits<std::int64_t>::max()}) {
    options.budget_bytes = budget;
    const std::string chart = memory_chart(timeline, 0, options);
    EXPECT_TRUE(mentions(chart, ">budget " + format_bytes(budget) + "<"));
    EXPECT_NO_THROW(test::parse_xml(chart));
  }
}

TEST(MemoryChart, EverythingStaysInThePicture) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 61;
  const std::vector<Timeline> timelines = {
      one_device({}, 0),
      one_device({}, 1'000'000'000),
      one_device({allocation(0, 1)}, 0),
      one_device({allocation(0, 5000, 0), allocation(0, -5000, 0)}, 0),
      one_device({allocation(7, 5000, 0)}, 7),
      one_device({allocation(7, 5000, 0)}, 3),  // the last change lies beyond the duration
      one_device({allocation(1'000'000'000'000'000, kHuge, 0)}, 1'000'000'000'000'001),
  };
  for (const Timeline& timeline : timelines) {
    for (const auto& [width, height] : {std::pair{560, 300}, {960, 420}, {3000, 900}}) {
      ChartOptions options;
      options.width = width;
      options.height = height;
      options.budget_bytes = 4096;
      for (const test::XmlElement& element : test::parse_xml(memory_chart(timeline, 0, options))) {
        if (element.name == "text") {
          const bool is_title = element.attributes.contains("font-size");
          const std::string anchor = is_title ? "start" : element.attributes.at("text-anchor");
          const double pixels = width_of(decode_utf8(element.text), is_title ? 16 : 12);
          const double before = anchor == "start" ? 0 : anchor == "middle" ? pixels / 2 : pixels;
          const double left = std::stod(element.attributes.at("x")) - before;
          EXPECT_GE(left, 0) << element.text;
          EXPECT_LE(left + pixels, width) << element.text;
        }
        for (const auto& [key, value] : element.attributes) {
          const bool across = key == "x" || key == "x1" || key == "x2" || key == "cx";
          const bool down = key == "y" || key == "y1" || key == "y2" || key == "cy";
          if (!across && !down) continue;
          EXPECT_GE(std::stod(value), 0) << element.name << " " << key;
          EXPECT_LE(std::stod(value), across ? width : height) << element.name << " " << key;
        }
      }
    }
  }
}

TEST(MemoryChart, IsBoundedForAMillionEvents) {
  std::vector<TimelineEvent> events;
  std::mt19937_64 random(1);
  std::int64_t alive = 0;
  for (std::int64_t i = 0; i < 1'000'000; ++i) {
    const bool allocate = alive == 0 || random() % 2 == 0;
    const std::int64_t bytes = allocate ? static_cast<std::int64_t>(random() % 1'000'000 + 1) : -alive;
    alive += bytes;
    events.push_back(allocation(i * 1000, bytes, 0));
    events.back().category = Category::kOther;
  }
  const Timeline timeline = one_device(std::move(events), 1'000'000'000);
  const std::string chart = memory_chart(timeline, 0);
  EXPECT_LT(chart.size(), 32U * 1024);
  EXPECT_TRUE(mentions(chart, "peak " + format_bytes(peak_of(timeline, 0).bytes.total()) + " in aten::mm"));
  for (const test::XmlElement& element : test::parse_xml(chart)) {
    if (element.name != "path") continue;
    const std::string& path = element.attributes.at("d");
    EXPECT_LE(std::count_if(path.begin(), path.end(), [](char c) { return c == 'H' || c == 'V'; }), 2 * 960);
  }
}

TEST(MemoryChart, RefusesSizesThatCannotHoldIt) {
  const Timeline timeline = one_device({}, 1);
  for (const auto& [width, height] :
       {std::pair{0, 420}, {960, -1}, {559, 420}, {960, 299}, {16385, 420}, {960, 16385}}) {
    ChartOptions options;
    options.width = width;
    options.height = height;
    EXPECT_THROW(memory_chart(timeline, 0, options), ConfigError) << width << " x " << height;
  }
}

TEST(CategoryName, IsWhatReportsPrint) {
  const std::vector<std::string> names = {
      "parameter", "gradient", "optimizer state", "activation", "communication buffer", "other"};
  for (std::size_t i = 0; i < kCategories; ++i) EXPECT_EQ(name(static_cast<Category>(i)), names[i]);
}

}  // namespace
}  // namespace reef
