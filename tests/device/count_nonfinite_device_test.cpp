// Compares the CUDA kernel that counts elements that are not finite with the reference.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "device/device_bytes.h"
#include "device/played_grid.h"
#include "kernels/cuda/count_nonfinite.h"

namespace reef {
namespace {

using kernels::FloatFormat;

// Counts in arrays of random bits that are shifted by less than a vector and have sizes close to those of a
// vector and of a block's share.
template <class Bits>
void expect_counts(FloatFormat format, std::mt19937_64& random) {
  const auto vector = static_cast<std::int64_t>(16 / sizeof(Bits));
  for (std::int64_t shift = 0; shift < vector; ++shift) {
    for (const std::int64_t elements :
         {std::int64_t{1}, vector - 1, vector, vector + 1, 3 * vector + 2, 256 * vector - 1, 256 * vector,
          256 * vector + 1, 5000 * vector + 3}) {
      for (const unsigned one_of : {1U, 3U, 1000U}) {
        std::vector<Bits> values(static_cast<std::size_t>(elements));
        kernels::with_exponent(format, [&](auto exponent) {
          for (Bits& value : values) {
            value = static_cast<Bits>(random());
            if (random() % one_of == 0) value |= static_cast<Bits>(exponent);
          }
        });
        DeviceBytes data(values, static_cast<std::size_t>(shift) * sizeof(Bits));
        DeviceBytes found(std::vector<unsigned long long>{77});
        kernels::cuda::count_nonfinite(data.data(), elements, format, found.as<unsigned long long>(),
                                       nullptr);
        ASSERT_EQ(static_cast<std::int64_t>(found.copy<unsigned long long>()[0]),
                  kernels::reference::count_nonfinite(values.data(), elements, format))
            << elements << " elements of " << sizeof(Bits) << " bytes, shifted by " << shift;
        ASSERT_TRUE(data.is_whole_around() && found.is_whole_around());
        ASSERT_EQ(data.copy<Bits>(), values);
      }
    }
  }
}

TEST(CountNonfiniteDevice, CountsWhatTheReferenceCounts) {
  std::mt19937_64 random(1);
  expect_counts<std::uint16_t>(FloatFormat::kFloat16, random);
  expect_counts<std::uint16_t>(FloatFormat::kBFloat16, random);
  expect_counts<std::uint32_t>(FloatFormat::kFloat32, random);
  expect_counts<std::uint64_t>(FloatFormat::kFloat64, random);
}

}  // namespace
}  // namespace reef
