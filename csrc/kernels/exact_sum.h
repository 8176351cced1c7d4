#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace reef::kernels {

/// A sum of doubles that are not negative, without rounding: the same for any order of the terms, and
/// wherever they are added up. A fixed-point number that has a place for every bit of a double (Kulisch and
/// Miranker 1986, "the long accumulator").
class ExactSum {
 public:
  /// Digits of 32 bits, the lowest first, the first bit being worth 2^-1074; and the number of terms that
  /// were not finite. Sums of two are sums of theirs, if they have been carried.
  static constexpr int kDigits = 68;
  using Digits = std::array<std::int64_t, kDigits + 1>;

  void add(double x) {
    const auto bits = std::bit_cast<std::uint64_t>(x);
    const auto exponent = static_cast<int>(bits >> 52 & 0x7FF);
    if (exponent == 0x7FF) {
      ++digits_[kDigits];
      return;
    }
    const std::uint64_t fraction = bits & ((std::uint64_t{1} << 52) - 1);
    const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | std::uint64_t{1} << 52;
    const int place = std::max(exponent, 1) - 1;
    const auto at = static_cast<std::size_t>(place / 32);
    const unsigned shift = static_cast<unsigned>(place % 32);
    const std::uint64_t low = mantissa << shift;
    digits_[at] += static_cast<std::int64_t>(low & kMask);
    digits_[at + 1] += static_cast<std::int64_t>(low >> 32);
    if (shift > 0) digits_[at + 2] += static_cast<std::int64_t>(mantissa >> (64 - shift));
    if (++since_carry_ == kMostTerms) carry();
  }
  void add(const ExactSum& other) { add(other.carried()); }
  void add(const Digits& digits) {
    carry();
    for (std::size_t i = 0; i <= kDigits; ++i) digits_[i] += digits[i];
    carry();
  }

  Digits carried() const {
    ExactSum copy = *this;
    copy.carry();
    return copy.digits_;
  }

  /// Rounded to the nearest double, to even between two; infinite if a term was not finite.
  double value() const {
    if (digits_[kDigits] > 0) return std::numeric_limits<double>::infinity();
    const Digits all = carried();
    int top = kDigits - 1;
    while (top > 0 && digit(all, top) == 0) --top;
    if (digit(all, top) == 0) return 0;
    const int highest = 32 * top + 63 - std::countl_zero(digit(all, top));
    const int lowest = std::max(highest - 52, 0);  // of what a double holds
    std::uint64_t mantissa = bits(all, lowest) & ((std::uint64_t{1} << 53) - 1);
    if (lowest > 0 && (bits(all, lowest - 1) & 1) != 0) {
      bool more = (digit(all, (lowest - 1) / 32) & ((std::uint64_t{1} << (lowest - 1) % 32) - 1)) != 0;
      for (int i = 0; i < (lowest - 1) / 32; ++i) more |= digit(all, i) != 0;
      if (more || (mantissa & 1) != 0) ++mantissa;
    }
    return std::ldexp(static_cast<double>(mantissa), lowest - 1074);
  }

 private:
  static std::uint64_t digit(const Digits& digits, int i) {
    return static_cast<std::uint64_t>(digits[static_cast<std::size_t>(i)]);
  }
  // Sixty-four of them.
  static std::uint64_t bits(const Digits& digits, int from) {
    const int at = from / 32;
    const int shift = from % 32;
    const std::uint64_t low = digit(digits, at) | digit(digits, at + 1) << 32;
    return shift == 0 ? low : low >> shift | digit(digits, at + 2) << (64 - shift);
  }

  static constexpr std::uint64_t kMask = 0xFFFFFFFF;
  static constexpr std::uint32_t kMostTerms = std::uint32_t{1} << 30;

  void carry() {
    for (std::size_t i = 0; i + 1 < kDigits; ++i) {
      digits_[i + 1] += digits_[i] >> 32;
      digits_[i] &= static_cast<std::int64_t>(kMask);
    }
    since_carry_ = 0;
  }

  Digits digits_{};
  std::uint32_t since_carry_ = 0;
};

}  // namespace reef::kernels
