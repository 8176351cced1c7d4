#include "reef/bytes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include "reef/error.h"

namespace reef {
namespace {

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr std::array<Unit, 12> kUnits{{{"", 1},
                                       {"B", 1},
                                       {"kB", 1e3},
                                       {"MB", 1e6},
                                       {"GB", 1e9},
                                       {"TB", 1e12},
                                       {"KiB", 0x1p10},
                                       {"MiB", 0x1p20},
                                       {"GiB", 0x1p30},
                                       {"TiB", 0x1p40},
                                       {"PiB", 0x1p50},
                                       {"EiB", 0x1p60}}};

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

[[noreturn]] void refuse(std::string_view text, const char* why) {
  throw ConfigError("'" + std::string(text) + "' is not a number of bytes: " + why +
                    "; write it as 2GiB, 512MiB, 1.5GB or 1048576");
}

}  // namespace

std::int64_t parse_bytes(std::string_view text) {
  const std::string_view whole = trimmed(text);
  double count = 0;
  const auto [end, error] =
      std::from_chars(whole.data(), whole.data() + whole.size(), count, std::chars_format::fixed);
  if (error != std::errc{} || !std::isfinite(count)) refuse(text, "it does not start with a number");
  if (count < 0) refuse(text, "it is negative");
  const auto unit_name = trimmed(whole.substr(static_cast<std::size_t>(end - whole.data())));
  for (const Unit& unit : kUnits) {
    if (unit.name != unit_name) continue;
    // A whole number of bytes beyond 2^53 would lose its last digits as a double.
    std::int64_t exact = 0;
    if (const auto whole_number = std::from_chars(whole.data(), end, exact);
        unit.bytes == 1 && whole_number.ec == std::errc{} && whole_number.ptr == end) {
      return exact;
    }
    const double bytes = std::round(count * unit.bytes);
    if (bytes >= 0x1p63) refuse(text, "it is more than 2^63 - 1");
    return static_cast<std::int64_t>(bytes);
  }
  refuse(text, "its unit is unknown");
}

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array<const char*, 6> kNames{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  const double magnitude = std::abs(static_cast<double>(bytes));
  if (magnitude < 1024) return std::to_string(bytes) + " B";
  double value = magnitude;
  std::size_t unit = 0;
  for (value /= 1024; value >= 999.5 && unit + 1 < kNames.size(); value /= 1024) ++unit;
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%s%.*f %s", bytes < 0 ? "-" : "", decimals, value, kNames[unit]);
  return text.data();
}

}  // namespace reef
