// Compares the CUDA kernels that take the largest elements with a sort.
#include <gtest/gtest.h>

#include <memory>

#include "device/device_bytes.h"
#include "device/played_grid.h"
#include "kernels/cuda/top_k.h"
#include "kernels/top_k_vectors.h"

namespace reef {
namespace {

using kernels::SparseEntry;
using top_k_vectors::by_sort;
using top_k_vectors::each_vector;
using top_k_vectors::same;
using top_k_vectors::Taken;
using top_k_vectors::Values;

// The new residual is written to separate memory, and to the memory of the gradient.
TEST(TopKDevice, TakesWhatASortHasFirst) {
  int number = 0;
  each_vector([&](const Values& gradient, const Values& residual, std::int64_t k, const std::string& text) {
    if (number++ % 5 != 0) return;
    played::seed(static_cast<std::uint64_t>(number));
    const Taken expected = by_sort(gradient, residual, k);
    for (const bool in_place : {false, true}) {
      DeviceBytes from(gradient), before(residual), other(Values(gradient.size()));
      DeviceBytes& left = in_place ? from : other;
      DeviceBytes entries(std::vector<SparseEntry>(static_cast<std::size_t>(k)));
      DeviceBytes scratch(std::vector<kernels::top_k::Scratch>(1));
      kernels::cuda::take_largest(from.as<float>(), residual.empty() ? nullptr : before.as<float>(),
                                  left.as<float>(), static_cast<std::int64_t>(gradient.size()),
                                  static_cast<std::uint32_t>(k), entries.as<SparseEntry>(),
                                  scratch.as<kernels::top_k::Scratch>(), nullptr);
      std::vector<SparseEntry> taken = entries.copy<SparseEntry>();
      std::erase_if(taken, [](const SparseEntry& each) { return each.index == kernels::cuda::kNoIndex; });
      ASSERT_TRUE(same(taken, expected.entries)) << text;
      ASSERT_EQ(left.copy<float>(), expected.left) << text;
      for (const DeviceBytes* const each : {&from, &before, &other, &entries, &scratch})
        ASSERT_TRUE(each->is_whole_around()) << text;
    }
  });
}

}  // namespace
}  // namespace reef
