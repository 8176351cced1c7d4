#include "kernels/ordered_sum.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace reef::kernels {
namespace {

// What operators give, one after another.
TEST(OrderedSum, IsTheSumInTheOrderOfItsParts) {
  torch::manual_seed(3);
  for (const std::int64_t elements : {0, 1, 7, 2047, 2048, 2049, 10000}) {
    for (const int ranks : {2, 3, 5, 8}) {
      for (const bool mean : {false, true}) {
        for (const int in_place : {-1, 0, ranks - 1}) {
          std::vector<at::Tensor> parts;
          std::vector<const float*> from;
          for (int rank = 0; rank < ranks; ++rank) {
            parts.push_back(torch::randn({elements}) * torch::randn({elements}).mul(30).exp2());
            from.push_back(parts.back().const_data_ptr<float>());
          }
          if (elements > 3) {
            parts[1][0] = std::numeric_limits<float>::infinity();
            parts[0][1] = std::numeric_limits<float>::quiet_NaN();
            parts[1][2] = std::numeric_limits<float>::denorm_min();
          }
          at::Tensor expected = parts[0] + parts[1];
          for (int rank = 2; rank < ranks; ++rank) expected.add_(parts[static_cast<std::size_t>(rank)]);
          if (mean) expected.div_(ranks);
          at::Tensor to = in_place < 0 ? torch::empty({elements}) : parts[static_cast<std::size_t>(in_place)];
          ordered_sum(from, to.mutable_data_ptr<float>(), elements, mean ? ranks : 1);
          EXPECT_TRUE(torch::equal(to.view(torch::kInt), expected.view(torch::kInt)))
              << elements << " of " << ranks << " ranks" << (mean ? ", mean" : "");
        }
      }
    }
  }
}

}  // namespace
}  // namespace reef::kernels
