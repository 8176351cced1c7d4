#include "kernels/reference/optim_step.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

namespace reef::kernels::reference {
namespace {

/// A value as a state is decoded: a line in the rank, its coefficients times the scale.
struct Line {
  float base, part, rank;
  float value(float scale) const { return std::fmaf(part * scale, rank, base * scale); }
};

// 2110.02861, as its authors build it, in order from the smallest value to the largest.
std::vector<Line> dynamic_lines(bool is_signed) {
  std::vector<Line> positive;
  int rank = 1;
  for (int i = 0; i < 7; ++i) {
    const int codes = is_signed ? 1 << i : 2 << i;
    const double scale = std::pow(10.0, i - 6);
    const double part = 0.9 * scale / codes;
    const int shift = is_signed ? 0 : 1;
    const double base = 0.1 * scale + part / 2 - part * (rank + shift);
    for (int k = 0; k < codes; ++k, ++rank) {
      positive.push_back(
          {static_cast<float>(base), static_cast<float>(part), static_cast<float>(rank + shift)});
    }
  }
  std::vector<Line> lines;
  if (is_signed) {
    for (std::size_t i = positive.size(); i-- > 0;) {
      lines.push_back({-positive[i].base, -positive[i].part, positive[i].rank});
    }
  }
  lines.push_back({0, 0, 0});
  lines.insert(lines.end(), positive.begin(), positive.end());
  lines.push_back({1, 0, 0});
  return lines;
}

float bfloat16_not_below(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0xFFFF) & 0xFFFF0000U;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

int block_of(OptimFormat format) {
  switch (uncompensated(format)) {
    case OptimFormat::kInt4:
      return 128;
    case OptimFormat::kCompanded8:
      return 32;
    default:
      return 256;
  }
}

// 2602.23349: rounded after companding, so not the nearest in value.
int companded_code(float x) {
  const float size = std::min(std::fabs(x), 1.0F);
  return 128 + static_cast<int>(std::nearbyintf(std::copysign(size * 254.0F / (1 + size), x)));
}

// As the maps above, continued between their values: sixteen numbers for each code.
float fine_value(OptimFormat format, bool is_signed, int number, float scale) {
  const int zero = !is_signed                     ? 0
                   : format == OptimFormat::kInt8 ? 2040
                   : format == OptimFormat::kInt4 ? 120
                                                  : 2056;
  const auto rank = static_cast<float>(number - zero) / 16;
  const float size = std::fabs(rank);
  switch (format) {
    case OptimFormat::kInt8: {
      const float shifted = size + (is_signed ? 0.5F : 1.0F);
      const double first = is_signed ? 1 : 2;  // codes of the first decade
      const int decade = shifted < first ? -1 : static_cast<int>(std::floor(std::log2(shifted / first)));
      if (decade == 7) return std::copysign(scale, rank);
      const double begin = decade < 0 ? first / 2 : std::ldexp(first, decade);
      const double from = decade < 0 ? 0 : std::pow(10.0, decade - 7);
      const double part = decade < 0 ? 1e-7 / (first - begin) : 9 * from / begin;
      const Line line{static_cast<float>(from - part * begin), static_cast<float>(part), shifted};
      return std::copysign(line.value(scale), rank);
    }
    case OptimFormat::kInt4: {
      if (!is_signed) return std::fmaf(static_cast<float>(number), scale / 256, scale / 256);
      constexpr double kValues[] = {0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1};
      const auto below = static_cast<std::size_t>(size);
      const double part = (kValues[below + 1] - kValues[below]) / (below < 7 ? 16 : 8);
      const auto base = static_cast<float>(kValues[below] - part * 16 * static_cast<double>(below));
      return std::copysign(std::fmaf(static_cast<float>(part), size * 16, base), rank) * scale;
    }
    default:
      break;
  }
  if (is_signed) return rank / (254 - size) * scale;
  const float root = rank * (scale * (1.0F / 255));
  return root * root;
}

// Of every number: what is kept of a value, in units of its scale.
std::vector<float> fine_map(OptimFormat format, bool is_signed) {
  const bool companded = format == OptimFormat::kCompanded8;
  const int numbers = format == OptimFormat::kInt4 ? (is_signed ? 241 : 256)
                      : companded && is_signed     ? 4089
                                                   : 4081;
  std::vector<float> map;
  for (int number = 0; number < numbers; ++number) {
    if (companded) {
      const auto y = static_cast<float>(number - 2056) / 16;
      map.push_back(is_signed ? y / (254 - std::fabs(y)) : static_cast<float>(number) / 4080);
    } else {
      map.push_back(fine_value(format, is_signed, number, 1));
    }
  }
  return map;
}

/// A state as floats; what writes it back finds the codes anew.
class State {
 public:
  State(const OptimState& state, OptimFormat format, bool is_signed, std::int64_t elements)
      : state_(state),
        format_(format == OptimFormat::kInt4Rank1 ? OptimFormat::kInt4 : uncompensated(format)),
        compensated_(uncompensated(format) != format),
        rank1_(state.matrix.rows > 0),
        signed_(is_signed),
        values_(static_cast<std::size_t>(elements)) {
    if (format_ != OptimFormat::kFloat32) map_ = map_of(format_, is_signed);
    if (format_ == OptimFormat::kInt8) lines_ = dynamic_lines(is_signed);
    if (compensated_) fine_ = fine_map(format_, is_signed);
    for (std::int64_t i = 0; i < elements; ++i) values_[static_cast<std::size_t>(i)] = read(i);
  }
  float& operator[](std::int64_t i) { return values_[static_cast<std::size_t>(i)]; }

  // The tile's new values.
  void write(std::int64_t first, std::int64_t last) {
    if (rank1_) return;
    if (format_ == OptimFormat::kFloat32) {
      std::memcpy(reinterpret_cast<float*>(state_.codes) + first, &values_[static_cast<std::size_t>(first)],
                  static_cast<std::size_t>(last - first) * sizeof(float));
      return;
    }
    const int block = block_of(format_);
    for (std::int64_t begin = first; begin < last; begin += block) {
      write_block(begin, std::min(begin + block, last));
    }
  }

  // When all tiles have theirs.
  void close() {
    if (!rank1_) return;
    const auto [rows, columns] = state_.matrix;
    auto* const scales = reinterpret_cast<float*>(state_.scales);
    std::fill_n(scales, rows + columns, 0.0F);
    const auto elements = static_cast<std::int64_t>(values_.size());
    for (std::int64_t i = 0; i < elements; ++i) {
      for (float* const most : {scales + i / columns, scales + rows + i % columns}) {
        *most = std::max(*most, (*this)[i]);
      }
    }
    for (std::int64_t i = 0; i < elements; ++i) {
      put_code(i, nearest_code(map_, signed_, (*this)[i] * (1 / std::max(scale(i), 0x1p-126F))));
    }
  }

 private:
  bool is_root() const { return format_ == OptimFormat::kCompanded8 && !signed_; }

  void write_block(std::int64_t begin, std::int64_t end) {
    float largest = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const float x = std::fabs((*this)[i]);
      largest = std::max(largest, is_root() ? std::sqrt(x) : x);
    }
    const std::int64_t block = begin / block_of(format_);
    if (format_ == OptimFormat::kCompanded8) {
      largest = bfloat16_not_below(largest);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &largest, sizeof bits);
      reinterpret_cast<std::uint16_t*>(state_.scales)[block] = static_cast<std::uint16_t>(bits >> 16);
    } else {
      reinterpret_cast<float*>(state_.scales)[block] = largest;
    }
    const float inverse = 1 / std::max(largest, 0x1p-126F);
    for (std::int64_t i = begin; i < end; ++i) {
      const float x = (is_root() ? std::sqrt((*this)[i]) : (*this)[i]) * inverse;
      const bool companded = format_ == OptimFormat::kCompanded8 && signed_;
      if (compensated_) {
        put_number(i, nearest_number(x));
        continue;
      }
      put_code(i, companded ? companded_code(x) : nearest_code(map_, signed_, x));
    }
  }

  float scale(std::int64_t i) const {
    if (rank1_) {
      const auto* const scales = reinterpret_cast<const float*>(state_.scales);
      return std::min(scales[i / state_.matrix.columns],
                      scales[state_.matrix.rows + i % state_.matrix.columns]);
    }
    const std::int64_t block = i / block_of(format_);
    if (format_ != OptimFormat::kCompanded8) return reinterpret_cast<const float*>(state_.scales)[block];
    const std::uint32_t bits = std::uint32_t{reinterpret_cast<const std::uint16_t*>(state_.scales)[block]}
                               << 16;
    float value = 0;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  // Two 4-bit codes a byte: elements 0 to 127 of a tile in the low halves, the others in the high ones.
  std::uint8_t& byte(std::int64_t i) const {
    auto* const bytes = reinterpret_cast<std::uint8_t*>(state_.codes) + (compensated_ ? i / 256 * 128 : 0);
    return format_ == OptimFormat::kInt4 ? bytes[i / 256 * 128 + i % 128] : bytes[i];
  }
  // After the codes of its tile; two a byte, as 4-bit codes.
  std::uint8_t& rest_byte(std::int64_t i) const {
    const auto elements = static_cast<std::int64_t>(values_.size());
    const std::int64_t tile = i / 256 * 256;
    auto* const bytes = reinterpret_cast<std::uint8_t*>(state_.codes);
    const std::int64_t codes = optim_codes_bytes(format_, std::min<std::int64_t>(elements - tile, 256));
    return bytes[optim_codes_bytes(format_, tile) + tile / 2 + codes + i % 128];
  }
  static int shift(std::int64_t i) { return i % 256 < 128 ? 0 : 4; }
  static int nibble(std::uint8_t pair, std::int64_t i) { return pair >> shift(i) & 15; }
  static void put_nibble(std::uint8_t& pair, std::int64_t i, int number) {
    pair = static_cast<std::uint8_t>((pair & ~(15 << shift(i))) | number << shift(i));
  }
  void put_code(std::int64_t i, int code) {
    if (format_ == OptimFormat::kInt4) return put_nibble(byte(i), i, code);
    byte(i) = static_cast<std::uint8_t>(code);
  }
  void put_number(std::int64_t i, int number) {
    put_code(i, number >> 4);
    put_nibble(rest_byte(i), i, number & 15);
  }
  // The kernels round by chance: to this one or the one beside it.
  int nearest_number(float x) const {
    const auto above = std::lower_bound(fine_.begin(), fine_.end(), x) - fine_.begin();
    if (above == 0) return 0;
    if (above == static_cast<std::ptrdiff_t>(fine_.size())) return static_cast<int>(fine_.size()) - 1;
    const auto at = static_cast<std::size_t>(above);
    return static_cast<int>(fine_[at] - x < x - fine_[at - 1] ? above : above - 1);
  }

  float read(std::int64_t i) const {
    if (format_ == OptimFormat::kFloat32) return reinterpret_cast<const float*>(state_.codes)[i];
    const int code = format_ == OptimFormat::kInt4 ? nibble(byte(i), i) : byte(i);
    if (compensated_) return fine_value(format_, signed_, code << 4 | nibble(rest_byte(i), i), scale(i));
    if (is_root()) {
      const float root = static_cast<float>(code) * (scale(i) * (1.0F / 255));
      return root * root;
    }
    if (format_ == OptimFormat::kInt8) return lines_[static_cast<std::size_t>(code)].value(scale(i));
    return map_[static_cast<std::size_t>(code)] * scale(i);
  }

  OptimState state_;
  OptimFormat format_;
  bool compensated_;
  bool rank1_;
  bool signed_;
  std::vector<float> map_;
  std::vector<Line> lines_;
  std::vector<float> fine_;
  std::vector<float> values_;
};

// As torch rounds, where its states are as ours.
float denominator(const OptimConstants& c, OptimFormat format, float root) {
  if (format == OptimFormat::kFloat32) return root / c.correction + c.eps;
  return std::fmaf(root, 1 / c.correction, c.eps);
}

float adam(const OptimConstants& c, OptimFormat format, float p, float g, float& m, float& v, float* most) {
  if (c.coupled_decay != 0) g = std::fmaf(p, c.coupled_decay, g);
  m = c.gain1 < 0.5F ? std::fmaf(c.gain1, g - m, m) : std::fmaf(c.gain1 - 1, g - m, g);
  v = std::fmaf(c.gain2 * g, g, v * c.decay2);
  if (most != nullptr) *most = std::max(*most, v);
  return p * c.kept + c.rate * m / denominator(c, format, std::sqrt(most != nullptr ? *most : v));
}

float momentum(const OptimConstants& c, float p, float g, float& buffer) {
  if (c.coupled_decay != 0) g = std::fmaf(p, c.coupled_decay, g);
  g = c.trust * g;
  buffer = c.first ? g : std::fmaf(g, c.gain1, buffer * c.decay1);
  return std::fmaf(c.nesterov ? std::fmaf(buffer, c.decay1, g) : buffer, c.rate, p);
}

float lion(const OptimConstants& c, float p, float g, float& m) {
  const float direction = std::fmaf(g, c.gain1, m * c.decay1);
  const float sign = direction == 0 ? 0.0F : std::copysign(1.0F, direction);
  m = std::fmaf(g, c.gain2, m * c.decay2);
  return std::fmaf(sign, c.rate, p * c.kept);
}

float rmsprop(const OptimConstants& c, float p, float g, float& v, float* mean, float* buffer) {
  if (c.coupled_decay != 0) g = std::fmaf(p, c.coupled_decay, g);
  v = std::fmaf(c.gain2 * g, g, v * c.decay2);
  float variance = v;
  if (mean != nullptr) {
    *mean = std::fmaf(c.gain2, g - *mean, *mean);
    variance = std::max(std::fmaf(-*mean, *mean, v), 0.0F);
  }
  const float root = std::sqrt(variance) + c.eps;
  if (buffer == nullptr) return p + c.rate * g / root;
  *buffer = *buffer * c.decay1 + g / root;
  return std::fmaf(*buffer, c.rate, p);
}

float adagrad(const OptimConstants& c, float p, float g, float& sum) {
  if (c.coupled_decay != 0) g = std::fmaf(p, c.coupled_decay, g);
  sum = std::fmaf(g, g, sum);
  return p + c.rate * g / (std::sqrt(sum) + c.eps);
}

float lamb(const OptimConstants& c, float p, float g, float& m, float& v) {
  m = std::fmaf(c.gain1, g - m, m);
  v = std::fmaf(c.gain2 * g, g, v * c.decay2);
  const float update = m * (1 / c.correction1) / std::fmaf(std::sqrt(v), 1 / c.correction, c.eps);
  return std::fmaf(std::fmaf(p, c.decoupled_decay, update), c.rate * c.trust, p);
}

float one(const OptimConstants& c, OptimRule rule, OptimFormat format, float p, float g, float* s) {
  switch (rule) {
    case OptimRule::kAdam:
      return adam(c, format, p, g, s[0], s[1], nullptr);
    case OptimRule::kAdamMaximum:
      return adam(c, format, p, g, s[0], s[1], &s[2]);
    case OptimRule::kSgd:
      return std::fmaf(c.coupled_decay != 0 ? std::fmaf(p, c.coupled_decay, g) : g, c.rate, p);
    case OptimRule::kMomentum:
    case OptimRule::kLars:
      return momentum(c, p, g, s[0]);
    case OptimRule::kLion:
      return lion(c, p, g, s[0]);
    case OptimRule::kRmsprop:
      return rmsprop(c, p, g, s[0], nullptr, nullptr);
    case OptimRule::kRmspropMomentum:
      return rmsprop(c, p, g, s[0], nullptr, &s[1]);
    case OptimRule::kRmspropCentered:
      return rmsprop(c, p, g, s[0], &s[1], nullptr);
    case OptimRule::kRmspropCenteredMomentum:
      return rmsprop(c, p, g, s[0], &s[1], &s[2]);
    case OptimRule::kAdagrad:
      return adagrad(c, p, g, s[0]);
    case OptimRule::kLamb:
      break;
  }
  return lamb(c, p, g, s[0], s[1]);
}

std::vector<bool> signs_of(OptimRule rule) {
  switch (rule) {
    case OptimRule::kAdam:
    case OptimRule::kLamb:
      return {true, false};
    case OptimRule::kAdamMaximum:
      return {true, false, false};
    case OptimRule::kSgd:
      return {};
    case OptimRule::kMomentum:
    case OptimRule::kLars:
    case OptimRule::kLion:
      return {true};
    case OptimRule::kRmsprop:
    case OptimRule::kAdagrad:
      return {false};
    case OptimRule::kRmspropMomentum:
    case OptimRule::kRmspropCentered:
      return {false, true};
    case OptimRule::kRmspropCenteredMomentum:
      break;
  }
  return {false, true, true};
}

}  // namespace

std::vector<float> map_of(OptimFormat format, bool is_signed) {
  std::vector<float> map;
  switch (format) {
    case OptimFormat::kInt8:
      for (const Line& line : dynamic_lines(is_signed)) map.push_back(line.value(1));
      return map;
    case OptimFormat::kInt4:
      if (is_signed) {
        return {-0.8875F, -0.6625F, -0.4375F, -0.2125F, -0.0775F, -0.0325F, -0.0055F, 0,
                0.0055F,  0.0325F,  0.0775F,  0.2125F,  0.4375F,  0.6625F,  0.8875F,  1};
      }
      for (int code = 0; code < 16; ++code) map.push_back(static_cast<float>(code + 1) / 16);
      return map;
    case OptimFormat::kCompanded8:  // 2602.23349: y = 2x / (1 + |x|) in 127ths; a root in 255ths
      for (int code = 0; code < 256; ++code) {
        const auto number = static_cast<float>(code - 128);
        map.push_back(is_signed ? number / (254 - std::fabs(number)) : static_cast<float>(code) / 255);
      }
      return map;
    default:
      break;
  }
  return map;
}

int nearest_code(const std::vector<float>& map, bool is_signed, float value) {
  int best = -1;
  double least = 0;
  for (std::size_t code = 0; code < map.size(); ++code) {
    if (!is_signed && value > 0 && map[code] == 0) continue;
    const double distance = std::fabs(double{map[code]} - value);
    const bool larger = best >= 0 && std::fabs(map[code]) > std::fabs(map[static_cast<std::size_t>(best)]);
    if (best < 0 || distance < least || (distance == least && larger)) {
      best = static_cast<int>(code);
      least = distance;
    }
  }
  return best;
}

std::int64_t step(const OptimTensor& tensor, OptimRule rule, OptimFormat format) {
  auto* const p = reinterpret_cast<float*>(tensor.parameter);
  const auto* const g = reinterpret_cast<const float*>(tensor.gradient);
  std::vector<State> states;
  for (const bool is_signed : signs_of(rule)) {
    states.emplace_back(tensor.states[states.size()], format, is_signed, tensor.elements);
  }
  const auto is_bad = [](float x) { return !std::isfinite(x); };
  std::int64_t nonfinite = 0;
  if (format == OptimFormat::kInt4Rank1) nonfinite = std::count_if(g, g + tensor.elements, is_bad);
  if (nonfinite > 0) return nonfinite;
  for (std::int64_t first = 0; first < tensor.elements; first += kTileElements) {
    const std::int64_t last = std::min(first + kTileElements, tensor.elements);
    const auto bad = std::count_if(g + first, g + last, is_bad);
    nonfinite += bad;
    if (bad > 0) continue;
    for (std::int64_t i = first; i < last; ++i) {
      float s[kMostStates] = {};
      for (std::size_t k = 0; k < states.size(); ++k) s[k] = states[k][i];
      p[i] = one(tensor.constants, rule, format, p[i], g[i] * tensor.constants.gradient, s);
      for (std::size_t k = 0; k < states.size(); ++k) states[k][i] = s[k];
    }
    for (State& state : states) state.write(first, last);
  }
  for (State& state : states) state.close();
  return nonfinite;
}

}  // namespace reef::kernels::reference
