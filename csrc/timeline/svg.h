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

}  // namespace reef
