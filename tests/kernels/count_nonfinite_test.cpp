#include "kernels/count_nonfinite.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "reef/build_info.h"
#include "reef/error.h"
#include "reef/numerics.h"

namespace reef {
namespace {

using kernels::FloatFormat;
using kernels::cpu::kBlockElements;
using kernels::cpu::kGrainElements;

struct Format {
  const char* name;
  torch::Dtype dtype;
  FloatFormat format;
  int bits;
  int exponent_bits;
  int mantissa_bits() const { return bits - 1 - exponent_bits; }
};
const std::vector<Format> kFormats = {{"float16", torch::kHalf, FloatFormat::kFloat16, 16, 5},
                                      {"bfloat16", torch::kBFloat16, FloatFormat::kBFloat16, 16, 8},
                                      {"float32", torch::kFloat, FloatFormat::kFloat32, 32, 8},
                                      {"float64", torch::kDouble, FloatFormat::kFloat64, 64, 11}};

void put(const torch::Tensor& tensor, std::int64_t index, std::uint64_t pattern) {
  const auto bytes = tensor.element_size();
  std::memcpy(static_cast<char*>(tensor.data_ptr()) + index * bytes, &pattern,
              static_cast<std::size_t>(bytes));
}

std::int64_t reference(const torch::Tensor& dense, const Format& format) {
  return kernels::reference::count_nonfinite(dense.const_data_ptr(), dense.numel(), format.format);
}

/// Patterns that are NaN or infinite: both infinities, NaNs quiet and signalling with the least and largest
/// payloads.
std::vector<std::uint64_t> nonfinite(const Format& format) {
  const std::uint64_t one = 1;
  const std::uint64_t exponent = ((one << format.exponent_bits) - 1) << format.mantissa_bits();
  const std::uint64_t sign = one << (format.bits - 1);
  std::vector<std::uint64_t> patterns;
  for (const std::uint64_t mantissa :
       {std::uint64_t{0}, one, one << (format.mantissa_bits() - 1), (one << format.mantissa_bits()) - 1}) {
    patterns.push_back(exponent | mantissa);
    patterns.push_back(sign | exponent | mantissa);
  }
  return patterns;
}

/// The finite patterns at the edges: zeros, least and largest denormals, least normals, largest finite, both
/// signs.
std::vector<std::uint64_t> finite(const Format& format) {
  const std::uint64_t one = 1;
  const std::uint64_t least_normal = one << format.mantissa_bits();
  const std::uint64_t infinity = ((one << format.exponent_bits) - 1) << format.mantissa_bits();
  const std::uint64_t sign = one << (format.bits - 1);
  std::vector<std::uint64_t> patterns;
  for (const std::uint64_t magnitude :
       {std::uint64_t{0}, one, least_normal - 1, least_normal, infinity >> 1, infinity - 1}) {
    patterns.push_back(magnitude);
    patterns.push_back(sign | magnitude);
  }
  return patterns;
}

/// Any bits at all, about one element in eight NaN or infinite.
torch::Tensor any_bits(const Format& format, std::int64_t elements) {
  const auto integer = format.bits == 16 ? torch::kShort : format.bits == 32 ? torch::kInt : torch::kLong;
  torch::Tensor bits = torch::randint(std::numeric_limits<std::int64_t>::min(),
                                      std::numeric_limits<std::int64_t>::max(), {elements}, torch::kLong);
  const std::int64_t infinity = ((std::int64_t{1} << format.exponent_bits) - 1) << format.mantissa_bits();
  bits = torch::where(torch::rand({elements}) < 0.125, bits.bitwise_or(infinity), bits);
  return bits.to(integer).view(format.dtype);
}

class CountNonfinite : public ::testing::TestWithParam<Format> {
 protected:
  void SetUp() override { torch::manual_seed(7); }
};

TEST_P(CountNonfinite, EqualsTheReferenceAtEverySize) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t size = 0; size <= 70; ++size) sizes.push_back(size);
  for (const std::int64_t limit : {kBlockElements, 2 * kBlockElements, kGrainElements, 2 * kGrainElements}) {
    for (const std::int64_t off : {-1, 0, 1}) sizes.push_back(limit + off);
  }
  sizes.push_back(5 * kGrainElements + 37);
  for (const std::int64_t size : sizes) {
    const torch::Tensor tensor = any_bits(GetParam(), size);
    const std::int64_t expected = reference(tensor, GetParam());
    ASSERT_EQ(count_nonfinite(tensor), expected) << size;
    ASSERT_EQ(expected, (~torch::isfinite(tensor)).sum().item<std::int64_t>()) << size;
    if (size == 0) continue;
    const torch::Tensor shifted = tensor.slice(0, 1);
    ASSERT_EQ(count_nonfinite(shifted), reference(shifted, GetParam())) << size;
  }
}

TEST_P(CountNonfinite, FindsOneWhereverItIs) {
  for (const std::int64_t size : {std::int64_t{1}, std::int64_t{33}, kBlockElements + 3}) {
    const torch::Tensor tensor = torch::ones({size}, GetParam().dtype);
    for (std::int64_t at = 0; at < size; ++at) {
      const std::vector<std::uint64_t> patterns = nonfinite(GetParam());
      put(tensor, at, patterns[static_cast<std::size_t>(at) % patterns.size()]);
      ASSERT_EQ(count_nonfinite(tensor), 1) << at << " of " << size;
      tensor[at].fill_(1);
    }
  }
}

TEST_P(CountNonfinite, DecidesEveryEdgePattern) {
  const torch::Tensor tensor = torch::zeros({kBlockElements}, GetParam().dtype);
  for (const bool expected : {true, false}) {
    for (const std::uint64_t pattern : expected ? nonfinite(GetParam()) : finite(GetParam())) {
      for (std::int64_t i = 0; i < kBlockElements; ++i) put(tensor, i, pattern);
      EXPECT_EQ(count_nonfinite(tensor), expected ? kBlockElements : 0) << std::hex << pattern;
      EXPECT_EQ(count_nonfinite(tensor.slice(0, 0, 5)), expected ? 5 : 0) << std::hex << pattern;
      EXPECT_EQ(reference(tensor, GetParam()), expected ? kBlockElements : 0) << std::hex << pattern;
    }
  }
}

TEST_P(CountNonfinite, ReadsViewsAsTheyLook) {
  const torch::Tensor base = any_bits(GetParam(), 2 * 3 * 5 * 7).view({2, 3, 5, 7});
  for (const torch::Tensor& view :
       {base.transpose(1, 3), base.slice(3, 1, 6, 2), base.select(1, 2), base.permute({0, 2, 3, 1}),
        base.select(0, 1).expand({4, 3, 5, 7}), base.flatten().slice(0, 3).as_strided({6, 6}, {2, 3}),
        base.slice(2, 4, 4), base.to(torch::MemoryFormat::ChannelsLast)}) {
    EXPECT_EQ(count_nonfinite(view), reference(view.contiguous(), GetParam()))
        << view.sizes() << view.strides();
  }
}

TEST_P(CountNonfinite, ReadsTensorsThatRequireGrad) {
  const torch::Tensor leaf = any_bits(GetParam(), 12).view({3, 4}).requires_grad_();
  EXPECT_EQ(count_nonfinite(leaf.slice(1, 1, 3)),
            reference(leaf.detach().slice(1, 1, 3).contiguous(), GetParam()));
}

TEST_P(CountNonfinite, CudaEqualsTheReference) {
  if (build_info().built_cuda.empty()) GTEST_SKIP() << "Reef was built without CUDA";
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  for (const std::int64_t size : {std::int64_t{0}, std::int64_t{1}, std::int64_t{15}, std::int64_t{70},
                                  kBlockElements, 5 * kGrainElements + 37, std::int64_t{1} << 24}) {
    const torch::Tensor host = any_bits(GetParam(), size + 17);
    const torch::Tensor device = host.to(torch::kCUDA);
    for (std::int64_t skip = 0; skip <= 17; ++skip) {  // every misalignment of the vectorised loads
      const torch::Tensor expected = host.slice(0, skip, skip + size);
      ASSERT_EQ(count_nonfinite(device.slice(0, skip, skip + size)), reference(expected, GetParam()))
          << size << "+" << skip;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, CountNonfinite, ::testing::ValuesIn(kFormats),
                         [](const auto& row) { return std::string(row.param.name); });

TEST(CountNonfiniteOf, IntegersAndBoolIsZero) {
  for (const auto dtype :
       {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong}) {
    EXPECT_EQ(count_nonfinite(torch::ones({5}, dtype)), 0);
  }
}

TEST(CountNonfiniteOf, WhatItCannotReadIsRefused) {
  for (const torch::Tensor& tensor :
       {torch::Tensor(), torch::zeros({2}, torch::kComplexFloat), torch::zeros({2}).to(torch::kFloat8_e5m2),
        torch::zeros({2}, torch::kMeta), torch::ones({2, 2}).to_sparse()}) {
    EXPECT_THROW(count_nonfinite(tensor), ConfigError);
  }
}

TEST(CountNonfiniteOf, CudaTensorInABuildWithoutCudaSaysSo) {
  if (!build_info().built_cuda.empty()) GTEST_SKIP() << "Reef was built with CUDA";
  // As a CUDA build of torch would hand it in; no device is needed to carry the name of one.
  const torch::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                               caffe2::TypeMeta::Make<float>(), c10::Device(c10::kCUDA, 0));
  try {
    count_nonfinite(tensor);
    FAIL() << "counted a CUDA tensor";
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find("built without CUDA"), std::string::npos) << message_of(error);
  }
}

}  // namespace
}  // namespace reef
