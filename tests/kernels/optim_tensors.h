#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/optim_step.h"

namespace reef::kernels {

/// But kInt4Rank1, which has tests of its own.
inline constexpr OptimFormat kFormats[] = {OptimFormat::kFloat32,
                                           OptimFormat::kBFloat16,
                                           OptimFormat::kInt8,
                                           OptimFormat::kInt4,
                                           OptimFormat::kCompanded8,
                                           OptimFormat::kInt8Compensated,
                                           OptimFormat::kInt4Compensated,
                                           OptimFormat::kCompanded8Compensated};
/// A test for each rule and format.
class EveryKernel : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  OptimRule rule() const { return static_cast<OptimRule>(std::get<0>(GetParam())); }
  OptimFormat format() const { return kFormats[std::get<1>(GetParam())]; }
  std::size_t r() const { return static_cast<std::size_t>(rule()); }
  std::size_t f() const { return static_cast<std::size_t>(format()); }
};

inline const OptimKernels& portable() { return *optim_kernels(OptimLevel::kPortable); }

/// A tensor with memory of its own: comparable and copyable.
struct Tensor {
  std::vector<std::byte> parameter, gradient, master;
  std::vector<std::byte> codes[kMostStates], scales[kMostStates];
  OptimTensor plain;

  bool operator==(const Tensor& other) const {
    for (int i = 0; i < kMostStates; ++i) {
      if (codes[i] != other.codes[i] || scales[i] != other.scales[i]) return false;
    }
    return parameter == other.parameter && master == other.master;
  }
  OptimTensor& view() {
    plain.parameter = parameter.data();
    plain.gradient = gradient.data();
    plain.master = master.empty() ? nullptr : master.data();
    for (int i = 0; i < kMostStates; ++i) plain.states[i] = {codes[i].data(), scales[i].data()};
    return plain;
  }
  std::int64_t tiles() const { return (plain.elements + kTileElements - 1) / kTileElements; }
};

inline std::uint16_t half_of(float x, OptimDtype dtype) {
  if (dtype == OptimDtype::kFloat16) {
    const auto half = static_cast<_Float16>(x);
    std::uint16_t bits = 0;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
  }
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}

inline void fill(std::vector<std::byte>& bytes, OptimDtype dtype, const std::vector<float>& values) {
  bytes.resize(values.size() * (dtype == OptimDtype::kFloat32 ? 4 : 2));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (dtype == OptimDtype::kFloat32) {
      std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    } else {
      const std::uint16_t half = half_of(values[i], dtype);
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
}

using Random = std::mt19937_64;

/// Values of all sizes, zeros among them.
inline std::vector<float> values(Random& random, std::int64_t elements, double largest) {
  std::vector<float> found;
  const double spread = static_cast<double>(random() % 6);
  for (std::int64_t i = 0; i < elements; ++i) {
    const double exponent = spread * std::generate_canonical<double, 53>(random);
    const double value =
        largest * std::pow(10, -exponent) * (2 * std::generate_canonical<double, 53>(random) - 1);
    found.push_back(random() % 50 == 0 ? 0.0F : static_cast<float>(value));
  }
  return found;
}

/// The dtypes of a parameter and its gradient, and what is kept of a parameter's rounding.
struct Choice {
  OptimDtype parameter = OptimDtype::kFloat32;
  OptimDtype gradient = OptimDtype::kFloat32;
  OptimMaster master = OptimMaster::kNone;
};

inline constexpr Choice kEveryChoice[] = {
    {},
    {OptimDtype::kFloat32, OptimDtype::kBFloat16, OptimMaster::kNone},
    {OptimDtype::kBFloat16, OptimDtype::kBFloat16, OptimMaster::kNone},
    {OptimDtype::kBFloat16, OptimDtype::kFloat32, OptimMaster::kFloat32},
    {OptimDtype::kBFloat16, OptimDtype::kBFloat16, OptimMaster::kSplit},
    {OptimDtype::kBFloat16, OptimDtype::kBFloat16, OptimMaster::kStochastic},
    {OptimDtype::kFloat16, OptimDtype::kFloat16, OptimMaster::kNone},
    {OptimDtype::kFloat16, OptimDtype::kFloat16, OptimMaster::kFloat32},
    {OptimDtype::kFloat16, OptimDtype::kFloat16, OptimMaster::kSplit},
    {OptimDtype::kFloat16, OptimDtype::kFloat16, OptimMaster::kStochastic},
};

inline Tensor random_tensor(Random& random, OptimFormat format, std::int64_t elements,
                            const Choice& choice = {}) {
  Tensor tensor;
  OptimTensor& plain = tensor.plain;
  plain.elements = elements;
  plain.parameter_dtype = choice.parameter;
  plain.gradient_dtype = choice.gradient;
  plain.master_kind = choice.master;
  plain.key = static_cast<std::uint32_t>(random());
  fill(tensor.parameter, choice.parameter, values(random, elements, 2));
  fill(tensor.gradient, choice.gradient, values(random, elements, 0.1));
  if (choice.master == OptimMaster::kFloat32)
    fill(tensor.master, OptimDtype::kFloat32, values(random, elements, 2));
  if (choice.master == OptimMaster::kSplit)
    tensor.master.assign(static_cast<std::size_t>(elements), std::byte{128});
  for (int i = 0; i < kMostStates; ++i) {
    tensor.codes[i].resize(static_cast<std::size_t>(optim_codes_bytes(format, elements)));
    tensor.scales[i].resize(static_cast<std::size_t>(optim_scales_bytes(format, elements)));
  }
  return tensor;
}

/// Codes and, compensated, rests. A tile that is not whole has halves of bytes that are nobody's.
struct Codes {
  std::vector<int> codes, rests;
};
inline Codes codes_of(const std::vector<std::byte>& bytes, OptimFormat format, std::int64_t elements) {
  const OptimFormat plain = uncompensated(format);
  Codes found;
  for (std::int64_t first = 0; first < elements; first += kTileElements) {
    const std::int64_t here = std::min(kTileElements, elements - first);
    const std::byte* const codes = bytes.data() + optim_codes_bytes(format, first);
    const std::byte* const rests = codes + optim_codes_bytes(plain, here);
    const auto half = [](const std::byte* of, std::int64_t i) {
      return static_cast<int>(of[i % 128]) >> (i < 128 ? 0 : 4) & 15;
    };
    for (std::int64_t i = 0; i < here; ++i) {
      found.codes.push_back(plain == OptimFormat::kInt4 ? half(codes, i) : static_cast<int>(codes[i]));
      if (plain != format) found.rests.push_back(half(rests, i));
    }
  }
  return found;
}

/// Gives the tensor a gradient with elements that are NaN and infinite.
inline void put_nonfinite(Tensor& tensor, Random& random) {
  std::vector<float> given = values(random, tensor.plain.elements, 0.1);
  given[random() % given.size()] = std::numeric_limits<float>::quiet_NaN();
  given[random() % given.size()] = std::numeric_limits<float>::infinity();
  fill(tensor.gradient, tensor.plain.gradient_dtype, given);
}

inline OptimConstants random_constants(Random& random) {
  const auto unit = [&] { return static_cast<float>(std::generate_canonical<double, 53>(random)); };
  OptimConstants c;
  if (random() % 2 == 0) c.coupled_decay = 0.01F * unit();
  c.decoupled_decay = 0.01F * unit();
  c.kept = 1 - 0.001F * unit();
  c.decay1 = 0.99F * unit();
  c.gain1 = 1 - c.decay1;
  c.decay2 = 0.9F + 0.099F * unit();
  c.gain2 = 1 - c.decay2;
  c.correction1 = 0.1F + 0.9F * unit();
  c.correction = 0.1F + 0.9F * unit();
  c.eps = 1e-8F;
  c.gradient = random() % 3 == 0 ? -0.5F : 1.0F;
  c.rate = -1e-2F * unit();
  c.first = random() % 4 == 0;
  c.nesterov = random() % 2 == 0;
  return c;
}

// The second state is a second moment, so that steps after the first have one to work with.
inline void warm(Tensor& tensor, OptimRule rule, OptimFormat format, Random& random, int steps) {
  for (int i = 0; i < steps; ++i) {
    fill(tensor.gradient, tensor.plain.gradient_dtype, values(random, tensor.plain.elements, 0.1));
    tensor.plain.constants = random_constants(random);
    portable().step[static_cast<std::size_t>(rule)][static_cast<std::size_t>(format)](tensor.view(), 0,
                                                                                      tensor.tiles());
  }
}

inline std::int64_t any_size(Random& random) {
  constexpr std::int64_t kSizes[] = {1,   2,   15,  16,  17,  100, 127, 128, 129,
                                     255, 256, 257, 300, 384, 385, 511, 513, 1000};
  return kSizes[random() % std::size(kSizes)];
}

/// One state's format.
struct Format {
  OptimFormat format;
  bool is_signed;
};
inline std::vector<std::uint8_t> encoded(const Format& f, const std::vector<float>& given,
                                         std::vector<std::byte>& scales,
                                         const OptimKernels& kernels = portable()) {
  const auto elements = static_cast<std::int64_t>(given.size());
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(optim_codes_bytes(f.format, elements)));
  scales.resize(static_cast<std::size_t>(optim_scales_bytes(f.format, elements)));
  kernels.encode[static_cast<std::size_t>(f.format)][f.is_signed](
      given.data(), {reinterpret_cast<std::byte*>(codes.data()), scales.data()}, elements, 0,
      (elements + kTileElements - 1) / kTileElements);
  return codes;
}

inline std::vector<float> decoded(const Format& f, std::vector<std::uint8_t> codes,
                                  std::vector<std::byte> scales, std::int64_t elements,
                                  const OptimKernels& kernels = portable()) {
  std::vector<float> found(static_cast<std::size_t>(elements));
  kernels.decode[static_cast<std::size_t>(f.format)][f.is_signed](
      {reinterpret_cast<std::byte*>(codes.data()), scales.data()}, found.data(), elements, 0,
      (elements + kTileElements - 1) / kTileElements);
  return found;
}

}  // namespace reef::kernels
