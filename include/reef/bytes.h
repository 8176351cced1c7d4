#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "reef/export.h"

namespace reef {

/// Byte counts as people write them: 512_MiB, "2GiB", "1.5 GB". Binary units (KiB to EiB) are powers
/// of 1024, decimal ones (kB to TB) powers of 1000; a number alone or with "B" is bytes.
inline namespace literals {
constexpr std::int64_t operator""_KiB(unsigned long long n) { return static_cast<std::int64_t>(n) << 10; }
constexpr std::int64_t operator""_MiB(unsigned long long n) { return static_cast<std::int64_t>(n) << 20; }
constexpr std::int64_t operator""_GiB(unsigned long long n) { return static_cast<std::int64_t>(n) << 30; }
}  // namespace literals

/// "2GiB" -> 2147483648. Fractions are allowed if they come to whole bytes after rounding to nearest.
/// Throws ConfigError for anything else: empty, negative, an unknown unit, more than 2^63 - 1 bytes.
REEF_API std::int64_t parse_bytes(std::string_view text);

/// 1536 -> "1.50 KiB". Three significant digits, binary units; counts under 1 KiB are exact ("512 B").
REEF_API std::string format_bytes(std::int64_t bytes);

}  // namespace reef
