#include "json.h"

#include "utf8.h"

namespace reef {

std::string json_string(std::string_view text) {
  constexpr std::u32string_view kHex = U"0123456789abcdef";
  std::u32string quoted = U"\"";
  for (const char32_t point : decode_utf8(text)) {
    switch (point) {
      case U'"':
        quoted += U"\\\"";
        break;
      case U'\\':
        quoted += U"\\\\";
        break;
      case U'\n':
        quoted += U"\\n";
        break;
      case U'\r':
        quoted += U"\\r";
        break;
      case U'\t':
        quoted += U"\\t";
        break;
      default:
        if (point >= 0x20) {
          quoted += point;
        } else {
          quoted.append(U"\\u00").append({kHex[point / 16], kHex[point % 16]});
        }
    }
  }
  return encode_utf8(quoted + U"\"");
}

}  // namespace reef
