// The largest elements of a sum on a CUDA device: what a sort takes, as on the CPU.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/top_k.h"
#include "kernels/top_k_vectors.h"

namespace reef {
namespace {

using namespace top_k_vectors;
using torch::Tensor;

Tensor on_device(const Values& values) {
  if (values.empty()) return {};
  return torch::tensor(values).to(torch::kCUDA);
}

// A device has bits of its own for a NaN.
std::vector<SparseEntry> with_one_nan(std::vector<SparseEntry> entries) {
  for (SparseEntry& each : entries) each.value = std::isnan(each.value) ? std::nanf("") : each.value;
  return entries;
}

TEST(TopKCuda, TakesWhatASortHasFirst) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  bool in_place = false;  // in turn: kernels by themselves are tested with both
  each_vector([&](const Values& gradient, const Values& residual, std::int64_t k, const std::string& text) {
    in_place = !in_place;
    const Taken expected = by_sort(gradient, residual, k);
    const Tensor from = on_device(gradient), left = in_place ? from : torch::full_like(from, 7);
    const auto entries = kernels::cuda::take_largest(from, on_device(residual), left, k);
    ASSERT_TRUE(same(with_one_nan(entries), with_one_nan(expected.entries))) << text;
    ASSERT_TRUE(torch::equal(left.cpu(), torch::tensor(expected.left))) << text;
  });
}

// Parts of several tiles, many elements equal to the k-th, and memory that begins anywhere.
TEST(TopKCuda, TakesTheSameOfMuchMore) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  torch::manual_seed(5);
  const std::int64_t elements = (std::int64_t{1} << 23) + 12345;
  const Tensor all = torch::randint(-1000, 1001, {elements + 3}).to(torch::kFloat);
  for (std::int64_t skip = 0; skip < 4; ++skip) {
    const Tensor on_host = all.slice(0, skip, skip + elements).clone();
    const Tensor gradient = all.to(torch::kCUDA).slice(0, skip, skip + elements);
    for (const std::int64_t k : {std::int64_t{1}, elements / 1000, elements / 3}) {
      Values left_on_host(static_cast<std::size_t>(elements));
      const auto expected =
          kernels::take_largest(on_host.const_data_ptr<float>(), nullptr, left_on_host.data(), elements, k);
      const Tensor left = torch::empty_like(gradient);
      const auto entries = kernels::cuda::take_largest(gradient, Tensor(), left, k);
      EXPECT_TRUE(same(entries, expected)) << "k " << k << ", from element " << skip;
      EXPECT_TRUE(torch::equal(left.cpu(), torch::tensor(left_on_host))) << "k " << k;
    }
  }
}

TEST(TopKCuda, OfNothingIsNothing) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const auto cuda = torch::TensorOptions().device(torch::kCUDA);
  EXPECT_TRUE(
      kernels::cuda::take_largest(torch::empty({0}, cuda), Tensor(), torch::empty({0}, cuda), 5).empty());
  const Tensor left = torch::ones({100}, cuda);
  EXPECT_TRUE(kernels::cuda::take_largest(torch::zeros({100}, cuda), Tensor(), left, 5).empty());
  EXPECT_FALSE(left.any().item<bool>());
}

}  // namespace
}  // namespace reef
