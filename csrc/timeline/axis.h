#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <string>

namespace reef {

/// 3.14159 with two decimals is "3.14" in every locale.
inline std::string fixed(double value, int decimals) {
  std::array<char, 400> text;
  const auto end =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed, decimals);
  return {text.data(), end.ptr};
}

/// Round marks from 0 up: `step` is 1, 2 or 5 times a power of ten of a unit.
struct Axis {
  double step;       ///< in base units (bytes, nanoseconds)
  double unit;       ///< base units per unit
  const char* name;  ///< of the unit
  int decimals;      ///< that the labels need

  std::string label(int mark) const {
    return mark == 0 ? "0" : fixed(mark * step / unit, decimals) + " " + name;
  }
};

struct AxisUnit {
  double size;
  const char* name;
};
inline constexpr std::array<AxisUnit, 7> kByteUnits{{{1, "B"},
                                                     {0x1p10, "KiB"},
                                                     {0x1p20, "MiB"},
                                                     {0x1p30, "GiB"},
                                                     {0x1p40, "TiB"},
                                                     {0x1p50, "PiB"},
                                                     {0x1p60, "EiB"}}};
inline constexpr std::array<AxisUnit, 4> kTimeUnits{{{1, "ns"}, {1e3, "µs"}, {1e6, "ms"}, {1e9, "s"}}};

/// The largest unit that `value` reaches, else the smallest.
template <std::size_t kCount>
AxisUnit unit_for(double value, const std::array<AxisUnit, kCount>& units) {
  AxisUnit unit = units.front();
  for (const AxisUnit& larger : units) {
    if (larger.size <= value) unit = larger;
  }
  return unit;
}

/// At most `marks` steps up to `top` > 0, in the largest unit that `top` reaches; never less than one base
/// unit.
template <std::size_t kCount>
Axis axis_up_to(double top, int marks, const std::array<AxisUnit, kCount>& units) {
  const AxisUnit unit = unit_for(top, units);
  const double least = unit.size == 1 ? 1 : 0;
  const double raw = std::max(least, top / unit.size / marks);
  const int exponent = static_cast<int>(std::floor(std::log10(raw) + 1e-9));
  const double power = std::pow(10, exponent);
  double factor = 10;
  for (const double candidate : {5.0, 2.0, 1.0}) {
    if (candidate * power >= raw * (1 - 1e-9)) factor = candidate;
  }
  const int decimals = factor == 10 ? -(exponent + 1) : -exponent;
  return {factor * power * unit.size, unit.size, unit.name, std::max(0, decimals)};
}

/// 1234567 nanoseconds are "1.23 ms".
inline std::string duration(double nanoseconds) {
  const AxisUnit unit = unit_for(nanoseconds, kTimeUnits);
  const double value = nanoseconds / unit.size;
  const int decimals = unit.size == 1 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return fixed(value, decimals) + " " + unit.name;
}

}  // namespace reef
