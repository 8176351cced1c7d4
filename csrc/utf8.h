#pragma once

#include <boost/locale/utf.hpp>
#include <iterator>
#include <string>
#include <string_view>

namespace reef {

/// JSON and XML demand valid UTF-8, names from outside promise nothing: malformed bytes become U+FFFD.
inline std::u32string decode_utf8(std::string_view text) {
  namespace utf = boost::locale::utf;
  std::u32string points;
  for (auto at = text.begin(); at != text.end();) {
    const utf::code_point point = utf::utf_traits<char>::decode(at, text.end());
    points += point == utf::illegal || point == utf::incomplete ? U'\uFFFD' : static_cast<char32_t>(point);
  }
  return points;
}

inline std::string encode_utf8(std::u32string_view points) {
  std::string text;
  for (const char32_t point : points) {
    boost::locale::utf::utf_traits<char>::encode(point, std::back_inserter(text));
  }
  return text;
}

}  // namespace reef
