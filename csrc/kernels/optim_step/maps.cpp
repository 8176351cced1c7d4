#include "kernels/optim_step/maps.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace reef::kernels {
namespace {

constexpr int kDecades = 7;
constexpr float kNever = std::numeric_limits<float>::infinity();

float not_below(double x) {
  const auto rounded = static_cast<float>(x);
  return rounded < x ? std::nextafter(rounded, kNever) : rounded;
}

float as_float(std::int32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Of a part of the number line [begin, end), in which at most one of the edges lies: that one. Gives the
// region at its beginning.
std::int32_t set_edge(float& edge, const double* edges, int count, double begin, double end) {
  std::int32_t at_begin = 0;
  edge = kNever;
  for (int i = 0; i < count; ++i) {
    if (edges[i] <= begin) {
      at_begin = i + 1;
    } else if (edges[i] < end) {
      edge = not_below(edges[i]);
    }
  }
  return at_begin;
}

constexpr double kValues4[] = {0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1};
constexpr int kFirstQuarter = 477;  // of DynamicMap4::kLeast: exponent and first two binary digits
double quarter_begin(int number) {
  return number == kFirstQuarter ? 0 : std::ldexp(1 + 0.25 * (number % 4), number / 4 - 127);
}

}  // namespace

DynamicMap::DynamicMap(bool is_signed) : shift(is_signed ? 0.5F : 1.0F) {
  for (int i = 0; i < 16; ++i) base[i] = width[i] = offset[i] = gain[i] = last[i] = 0;
  const auto exponent_of = [](double rank) { return (127 + std::ilogb(rank)) & 15; };

  double first[kDecades + 1];  // value of each decade's first code; then of 1
  double final[kDecades];
  for (int i = 0; i < kDecades; ++i) {
    const double codes = is_signed ? 1 << i : 2 << i;
    const double scale = std::pow(10.0, i - (kDecades - 1));
    const double part = 0.9 * scale / codes;
    const double first_rank = is_signed ? codes : codes - 1;
    const int e = exponent_of(first_rank + shift);
    width[e] = static_cast<float>(part);
    base[e] = static_cast<float>(0.1 * scale + part / 2 - part * (first_rank + shift));
    const auto value = [&](double rank) {  // as it will be decoded
      return std::fmaf(width[e], static_cast<float>(rank + shift), base[e]);
    };
    first[i] = value(first_rank);
    final[i] = value(first_rank + codes - 1);
    offset[i + 1] = static_cast<float>(first_rank - 0.1 * scale / part);
    gain[i + 1] = static_cast<float>(1 / part);
    last[i + 1] = static_cast<float>(first_rank + codes - 0.5);
  }
  first[kDecades] = 1;
  const float one = is_signed ? 128 : 255;
  base[exponent_of(one + shift)] = 1;
  offset[kDecades + 1] = last[kDecades + 1] = one;

  double edges[kDecades + 1];  // from edges[i] on: region i + 1
  edges[0] = first[0] / 2;
  for (int i = 1; i <= kDecades; ++i) edges[i] = (final[i - 1] + first[i]) / 2;
  if (!is_signed) {
    // A second moment that is not zero never becomes zero: a step would divide by it.
    edges[0] = std::numeric_limits<float>::min();
    const double border = (first[0] + final[0]) / 2;
    offset[1] = 1;
    gain[1] = static_cast<float>(1 / border);
  }
  for (int binade = 0; binade < 32; ++binade) {
    const double begin = binade == 0 ? 0 : std::ldexp(1.0, binade - 31);
    const double end = std::ldexp(1.0, binade - 30);
    region[binade] = as_float(set_edge(edge[binade], edges, kDecades + 1, begin, end));
  }
}

const DynamicMap& signed_dynamic_map() {
  static const DynamicMap map(true);
  return map;
}

const DynamicMap& unsigned_dynamic_map() {
  static const DynamicMap map(false);
  return map;
}

DynamicMap4::DynamicMap4() {
  for (int code = 0; code < 16; ++code) {
    const double size = kValues4[code < 7 ? 7 - code : code - 7];
    value[code] = static_cast<float>(code < 7 ? -size : size);
  }
  double borders[8];
  for (int i = 0; i < 8; ++i) borders[i] = (double{value[7 + i]} + value[8 + i]) / 2;
  for (int number = kFirstQuarter; number < kFirstQuarter + 32; ++number) {
    const int quarter = number & 31;
    rank[quarter] = static_cast<float>(
        set_edge(edge[quarter], borders, 8, quarter_begin(number), quarter_begin(number + 1)));
  }
}

const DynamicMap4& signed_dynamic_map4() {
  static const DynamicMap4 map;
  return map;
}

FineDynamicMap::FineDynamicMap(bool is_signed) {
  for (int i = 0; i < 16; ++i) base[i] = width[i] = offset[i] = gain[i] = 0;
  const double shift = is_signed ? 0.5 : 1;  // added to a rank before its exponent is taken
  // In a region: value = at + part * (shifted rank - begin), from `begin` on.
  const auto set = [&](int region_number, double begin, double at, double part) {
    const int e = (127 + std::ilogb(begin)) & 15;
    width[e] = static_cast<float>(part);
    base[e] = static_cast<float>(at - part * begin);
    gain[region_number] = part == 0 ? 0 : static_cast<float>(16 / part);
    offset[region_number] = static_cast<float>(16 * (begin - shift - (part == 0 ? 0 : at / part)));
  };
  double edges[kDecades + 1];              // from edges[i] on: region i + 1
  const double codes = is_signed ? 1 : 2;  // of the first decade
  set(0, shift, 0, 1e-7 / (codes - shift));
  for (int i = 0; i < kDecades; ++i) {
    edges[i] = std::pow(10.0, i - kDecades);
    set(i + 1, std::ldexp(codes, i), edges[i], 9 * edges[i] / std::ldexp(codes, i));
  }
  edges[kDecades] = 1;
  set(kDecades + 1, std::ldexp(codes, kDecades), 1, 0);
  for (int binade = 0; binade < 32; ++binade) {
    const double begin = binade == 0 ? 0 : std::ldexp(1.0, binade - 31);
    const double end = std::ldexp(1.0, binade - 30);
    region[binade] = as_float(set_edge(edge[binade], edges, kDecades + 1, begin, end));
  }
}

const FineDynamicMap& signed_fine_map() {
  static const FineDynamicMap map(true);
  return map;
}

const FineDynamicMap& unsigned_fine_map() {
  static const FineDynamicMap map(false);
  return map;
}

FineDynamicMap4::FineDynamicMap4() {
  for (int i = 0; i < 16; ++i) base[i] = width[i] = offset[i] = gain[i] = 0;
  for (int i = 0; i < 8; ++i) {
    const double from = kValues4[i];
    const double part = (kValues4[i + 1] - from) / (i < 7 ? 16 : 8);
    width[i] = static_cast<float>(part);
    base[i] = static_cast<float>(from - part * 16 * i);
    gain[i] = static_cast<float>(1 / part);
    offset[i] = static_cast<float>(16 * i - from / part);
  }
  for (int number = kFirstQuarter; number < kFirstQuarter + 32; ++number) {
    region[number & 31] = as_float(
        set_edge(edge[number & 31], kValues4 + 1, 7, quarter_begin(number), quarter_begin(number + 1)));
  }
}

const FineDynamicMap4& signed_fine_map4() {
  static const FineDynamicMap4 map;
  return map;
}

}  // namespace reef::kernels
