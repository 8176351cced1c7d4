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

std::int32_t bits_of(float value) {
  std::int32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr double kValues4[] = {0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1};

// Parts are numbered by the biased exponent of a float followed, for quarters, by its first two mantissa
// bits. The first part begins at zero.
constexpr int kFirstQuarter = 477;  // The number of Regions::kLeastQuarter.
constexpr int kFirstBinade = 96;    // The number of Regions::kLeastBinade.
double part_begin(Regions::Parts parts, int number) {
  if (parts == Regions::Parts::kBinades) {
    return number == kFirstBinade ? 0 : std::ldexp(1.0, number - 127);
  }
  return number == kFirstQuarter ? 0 : std::ldexp(1 + 0.25 * (number % 4), number / 4 - 127);
}

}  // namespace

Regions::Regions(Parts parts, const double* edges, int count) {
  for (int i = 0; i < 8; ++i) edge[i] = i < count ? not_below(edges[i]) : kNever;
  const int first = parts == Parts::kBinades ? kFirstBinade : kFirstQuarter;
  for (int number = first; number < first + 32; ++number) {
    const double begin = part_begin(parts, number);
    const double end = part_begin(parts, number + 1);
    std::int32_t region = 0;
    edge_in_part[number & 31] = kNever;
    for (int i = 0; i < count; ++i) {
      if (edges[i] <= begin) {
        region = i + 1;
      } else if (edges[i] < end) {
        edge_in_part[number & 31] = edge[i];
      }
    }
    region_of_part[number & 31] = as_float(region);
  }
}

DynamicMap::DynamicMap(bool is_signed) : regions(Regions::Parts::kBinades, nullptr, 0) {
  for (int i = 0; i < 16; ++i) base[i] = width[i] = 0;
  double edges[kDecades + 1];  // Region i + 1 begins at edges[i].
  double before = 0;           // The value of the preceding code.
  for (int i = 0; i < kDecades; ++i) {
    const double codes = is_signed ? 1 << i : 2 << i;
    const double scale = std::pow(10.0, i - (kDecades - 1));
    const double width_of_code = 0.9 * scale / codes;
    const double rank = codes;  // The first rank of the decade; unsigned, the first rank + 1.
    const auto size = static_cast<float>(width_of_code * (rank - 0.5) - 0.1 * scale);
    width[i + 1] = static_cast<float>(width_of_code / multiple(is_signed));
    base[i + 1] = is_signed ? size : -size;
    const auto value = [&](double number) {  // Rounds as decoding does.
      return std::fmaf(width[i + 1], static_cast<float>(number) * multiple(is_signed), -size);
    };
    edges[i] = (before + value(rank)) / 2;
    before = value(rank + codes - 1);
    gain[(i + 1) & 7] = static_cast<float>(1 / (0.9 * scale)) * part(is_signed);
  }
  const double one = is_signed ? 128 : 256;  // The rank of 1; unsigned, its rank + 1.
  width[kDecades + 1] = static_cast<float>(1 / (one * multiple(is_signed)));
  edges[kDecades] = (before + 1) / 2;
  // From its edge to 1, the last region is less than one code wide.
  gain[(kDecades + 1) & 7] = static_cast<float>(1 / (9 * (edges[kDecades] - 0x1p-12))) * part(is_signed);
  // A second moment that is not zero never becomes zero: a step would divide by it.
  if (!is_signed) edges[0] = 0;
  regions = Regions(Regions::Parts::kBinades, edges, kDecades + 1);
  for (int binade = 0; binade < 32; ++binade) {
    const float edge = regions.edge_in_part[binade];
    std::int32_t added = (bits_of(regions.region_of_part[binade]) - (kFirstBinade + binade)) * (1 << 23);
    if (edge != kNever) added += (1 << 23) - (bits_of(edge) & 0x7FFFFF);
    jump[binade] = as_float(added);
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

DynamicMap4::DynamicMap4() : regions(Regions::Parts::kQuarters, nullptr, 0) {
  for (int code = 0; code < 16; ++code) {
    const double size = kValues4[code < 7 ? 7 - code : code - 7];
    value[code] = static_cast<float>(code < 7 ? -size : size);
  }
  double borders[8];
  for (int i = 0; i < 8; ++i) borders[i] = (double{value[7 + i]} + value[8 + i]) / 2;
  regions = Regions(Regions::Parts::kQuarters, borders, 8);
}

const DynamicMap4& signed_dynamic_map4() {
  static const DynamicMap4 map;
  return map;
}

FineDynamicMap::FineDynamicMap(bool is_signed) : regions(Regions::Parts::kBinades, nullptr, 0) {
  for (int i = 0; i < 16; ++i) base[i] = width[i] = 0;
  // Sets a region that begins at the shifted rank `begin`: value = at + part * (shifted rank - begin).
  const auto set = [&](int region, double begin, double at, double part) {
    width[region] = static_cast<float>(part);
    base[region] = static_cast<float>(at - part * begin);
    gain[region] = static_cast<float>(16 / part);
    offset[region] = static_cast<float>(16 * (begin - shift(is_signed) - at / part));
  };
  double edges[kDecades];                  // Region i + 1 begins at edges[i].
  const double codes = is_signed ? 1 : 2;  // The number of codes in the first decade.
  set(0, shift(is_signed), 0, 1e-7 / (codes - shift(is_signed)));
  for (int i = 0; i < kDecades; ++i) {
    edges[i] = std::pow(10.0, i - kDecades);
    set(i + 1, std::ldexp(codes, i), edges[i], 9 * edges[i] / std::ldexp(codes, i));
  }
  base[kDecades + 1] = 1;
  regions = Regions(Regions::Parts::kBinades, edges, kDecades);
}

const FineDynamicMap& signed_fine_map() {
  static const FineDynamicMap map(true);
  return map;
}

const FineDynamicMap& unsigned_fine_map() {
  static const FineDynamicMap map(false);
  return map;
}

FineDynamicMap4::FineDynamicMap4() : regions(Regions::Parts::kQuarters, kValues4 + 1, 7) {
  for (int i = 0; i < 8; ++i) {
    const double from = kValues4[i];
    const double part = (kValues4[i + 1] - from) / (i < 7 ? 16 : 8);
    width[i] = static_cast<float>(part);
    base[i] = static_cast<float>(from - part * 16 * i);
    gain[i] = static_cast<float>(1 / part);
    offset[i] = static_cast<float>(16 * i - from / part);
  }
}

const FineDynamicMap4& signed_fine_map4() {
  static const FineDynamicMap4 map;
  return map;
}

}  // namespace reef::kernels
