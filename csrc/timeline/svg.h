#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "timeline/axis.h"
#include "utf8.h"

namespace reef {

/// `text` for XML 1.0, in elements and attributes. Characters that XML cannot hold become U+FFFD.
inline std::string xml_text(std::string_view text) {
  std::u32string safe;
  for (const char32_t point : decode_utf8(text)) {
    const bool control = point < 0x20 && point != '\t' && point != '\n' && point != '\r';
    switch (point) {
      case U'&':
        safe += U"&amp;";
        break;
      case U'<':
        safe += U"&lt;";
        break;
      case U'>':
        safe += U"&gt;";
        break;
      case U'"':
        safe += U"&quot;";
        break;
      case U'\'':
        safe += U"&apos;";
        break;
      default:
        safe += control || point == 0xFFFE || point == 0xFFFF ? U'\uFFFD' : point;
    }
  }
  return encode_utf8(safe);
}

/// An upper estimate of how wide `text` is drawn, for fonts we cannot measure.
inline double width_of(std::u32string_view text, double font_pixels) {
  double ems = 0;
  for (const char32_t point : text) ems += point < 0x250 ? 0.65 : 1.05;
  return ems * font_pixels;
}

/// `text` cut with an ellipsis so that it stays within `pixels`.
inline std::string fitted(std::string_view text, double pixels, double font_pixels) {
  const std::u32string points = decode_utf8(text);
  if (width_of(points, font_pixels) <= pixels) return std::string(text);
  double room = pixels - width_of(U"…", font_pixels);
  std::u32string kept;
  for (const char32_t point : points) {
    room -= width_of({&point, 1}, font_pixels);
    if (room < 0) break;
    kept += point;
  }
  return encode_utf8(kept + U"…");
}

/// A coordinate in tenths of a pixel.
inline std::string tenths(double pixels) {
  std::string number = fixed(pixels, 1);
  if (number.ends_with(".0")) number.resize(number.size() - 2);
  return number;
}

/// name="value". A number is a coordinate.
struct Attribute {
  Attribute(std::string_view attribute, double pixels) : name(attribute), value(tenths(pixels)) {}
  Attribute(std::string_view attribute, std::string_view text) : name(attribute), value(xml_text(text)) {}
  std::string_view name;
  std::string value;
};

/// One element. `content` is markup: text in it has been through xml_text().
inline std::string element(std::string_view name, std::initializer_list<Attribute> attributes,
                           std::string_view content = "") {
  std::string markup = "<" + std::string(name);
  for (const Attribute& attribute : attributes) {
    markup.append(" ").append(attribute.name).append("=\"").append(attribute.value).append("\"");
  }
  if (content.empty()) return markup + "/>\n";
  return markup.append(">").append(content).append("</").append(name).append(">\n");
}

/// What all pictures look like.
inline constexpr const char* kInk = "#1f2328";
inline constexpr const char* kMuted = "#59636e";
inline constexpr const char* kRule = "#8c959f";
inline constexpr const char* kHair = "#d0d7de";
inline constexpr const char* kRed = "#c5221f";
inline constexpr double kTextPixels = 12;
inline constexpr double kTitlePixels = 16;

inline std::string label(double x, double y, std::string_view anchor, std::string_view words,
                         std::string_view weight = "400", std::string_view fill = kInk) {
  return element("text",
                 {{"x", x}, {"y", y}, {"text-anchor", anchor}, {"font-weight", weight}, {"fill", fill}},
                 xml_text(words));
}

inline std::string line(double x1, double y1, double x2, double y2, std::string_view stroke,
                        std::string_view dashes = "none") {
  return element(
      "line",
      {{"x1", x1}, {"y1", y1}, {"x2", x2}, {"y2", y2}, {"stroke", stroke}, {"stroke-dasharray", dashes}});
}

/// The whole of one: `content` is markup, on white.
inline std::string picture_of(double width, double height, std::string_view title,
                              std::string_view description, std::string_view content) {
  const std::string all = "\n" + element("title", {}, xml_text(title)) +
                          element("desc", {}, xml_text(description)) +
                          element("rect", {{"x", 0.5},
                                           {"y", 0.5},
                                           {"width", width - 1},
                                           {"height", height - 1},
                                           {"rx", 8},
                                           {"fill", "#fff"},
                                           {"stroke", kHair}}) +
                          std::string(content);
  return element("svg",
                 {{"xmlns", "http://www.w3.org/2000/svg"},
                  {"width", width},
                  {"height", height},
                  {"viewBox", "0 0 " + tenths(width) + " " + tenths(height)},
                  {"role", "img"},
                  {"font-family", "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"},
                  {"font-size", kTextPixels},
                  {"fill", kInk}},
                 all);
}

}  // namespace reef
