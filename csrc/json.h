#pragma once

#include <string>
#include <string_view>

namespace reef {

/// `text` as a JSON string, quotes included. Malformed UTF-8 becomes U+FFFD, so the result always parses.
std::string json_string(std::string_view text);

}  // namespace reef
