#include "reef/bytes.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "reef/error.h"

namespace reef {
namespace {

TEST(Bytes, LiteralsArePowersOf1024) {
  EXPECT_EQ(1_KiB, 1024);
  EXPECT_EQ(3_MiB, 3 * 1024 * 1024);
  EXPECT_EQ(2_GiB, std::int64_t{2} << 30);
}

TEST(Bytes, Reads) {
  const std::vector<std::pair<const char*, std::int64_t>> rows{
      {"0", 0},
      {"10", 10},
      {"7B", 7},
      {"1 KiB", 1024},
      {"2GiB", 2_GiB},
      {"1.5MiB", 1536_KiB},
      {"3kB", 3000},
      {"  4 GB  ", 4'000'000'000},
      {"1TiB", 1024_GiB},
      {"0.5 B", 1},
      {"9223372036854775807", std::numeric_limits<std::int64_t>::max()},
      {"9007199254740993 B", 9007199254740993}};
  for (const auto& [text, bytes] : rows) EXPECT_EQ(parse_bytes(text), bytes) << text;
}

TEST(Bytes, RefusesWithASentenceThatQuotesTheText) {
  for (const char* text : {"", " ", "GiB", "-1", "-0.5GiB", "1e3", "1,5GiB", "2 gigabytes", "nan", "inf",
                           "0x10", "1 2", "9223372036854775808", "8388608TiB", "1 kib"}) {
    try {
      parse_bytes(text);
      ADD_FAILURE() << "'" << text << "' was read";
    } catch (const ConfigError& error) {
      EXPECT_NE(message_of(error).find("'" + std::string(text) + "'"), std::string::npos);
      EXPECT_NE(message_of(error).find("write it as"), std::string::npos);
    }
  }
}

TEST(Bytes, Shows) {
  const std::vector<std::pair<std::int64_t, const char*>> rows{{0, "0 B"},
                                                               {1023, "1023 B"},
                                                               {1024, "1.00 KiB"},
                                                               {1536, "1.50 KiB"},
                                                               {10239, "10.0 KiB"},
                                                               {102400, "100 KiB"},
                                                               {1023_KiB, "1.00 MiB"},
                                                               {5_MiB, "5.00 MiB"},
                                                               {-3_MiB, "-3.00 MiB"},
                                                               {999_KiB, "999 KiB"}};
  for (const auto& [bytes, text] : rows) EXPECT_EQ(format_bytes(bytes), text);
}

// What is shown has three digits, so it reads back to within half of the last one, for any size.
TEST(Bytes, ShownValuesReadBackWithinTheirDigits) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 10'000; ++i) {
    const auto bytes = static_cast<std::int64_t>(random() >> (2 + random() % 61));
    const std::string shown = format_bytes(bytes);
    EXPECT_NEAR(static_cast<double>(parse_bytes(shown)), static_cast<double>(bytes),
                0.0051 * static_cast<double>(bytes))
        << shown;
  }
}

}  // namespace
}  // namespace reef
