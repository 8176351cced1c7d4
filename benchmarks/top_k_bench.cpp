// Measures the selection of a gradient's largest elements, and the merge of what two ranks have selected,
// beside LibTorch's operators for the same and beside a plain copy: on one thread, in memory that has been
// touched.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "harness.h"
#include "kernels/top_k.h"
#include "shard/sparse_gradient.h"

namespace {

using at::Tensor;
using reef::bench::in_turn;
using reef::bench::print_with_ratios;
using reef::kernels::SparseEntry;

constexpr std::int64_t kElements = 25'000'000, kLargest = 25'000;
constexpr int kRounds = 9, kMergeRounds = 101;

void select() {
  const Tensor gradient = torch::randn({kElements}), before = torch::randn({kElements}).mul(0.1);
  const Tensor left = torch::zeros({kElements});
  const auto take = [=](const float* residual) {
    reef::kernels::take_largest(gradient.const_data_ptr<float>(), residual, left.mutable_data_ptr<float>(),
                                kElements, kLargest);
  };
  const auto largest = [](const Tensor& values) {
    return std::get<1>(values.abs().topk(kLargest, 0, /*largest=*/true, /*sorted=*/false));
  };
  print_with_ratios("top_k/25000 of 25000000",
                    in_turn({{"copy", {}, [=] { left.copy_(gradient); }, {}},
                             {"torch.topk", {}, [=] { largest(gradient); }, {}},
                             {"one pass", {}, [=] { take(nullptr); }, {}}},
                            kRounds, kElements),
                    "ns");
  print_with_ratios("top_k/25000 of 25000000, with what is held back",
                    in_turn({{"copy", {}, [=] { left.copy_(gradient); }, {}},
                             {"operators",
                              {},
                              [=] {
                                const Tensor indices = largest(left.copy_(gradient).add_(before));
                                left.index_select(0, indices);
                                left.index_fill_(0, indices, 0);
                              },
                              {}},
                             {"one pass", {}, [=] { take(before.const_data_ptr<float>()); }, {}}},
                            kRounds, kElements),
                    "ns");
}

// Entries at random places.
struct Selected {
  Tensor indices = std::get<0>(torch::randperm(kElements).slice(0, 0, kLargest).sort());
  Tensor values = torch::randn({kLargest});

  std::vector<SparseEntry> entries() const {
    const auto* const index = indices.const_data_ptr<std::int64_t>();
    const auto* const value = values.const_data_ptr<float>();
    std::vector<SparseEntry> all;
    for (std::int64_t i = 0; i < kLargest; ++i)
      all.push_back({static_cast<std::uint32_t>(index[i]), value[i]});
    return all;
  }
};

void merge() {
  const Selected first, second;
  const std::vector<SparseEntry> entries = first.entries(), others = second.entries();
  const auto by_operators = [=] {
    const auto [all, at, counts] = at::_unique2(torch::cat({first.indices, second.indices}), true, true);
    const Tensor sums =
        torch::zeros({all.numel()}).index_add_(0, at, torch::cat({first.values, second.values}));
    const Tensor largest = std::get<1>(sums.abs().topk(kLargest, 0, true, false));
    all.index_select(0, largest);
    sums.index_select(0, largest);
  };
  print_with_ratios("top_k/merge of two times 25000 entries",
                    in_turn({{"operators", {}, by_operators, {}},
                             {"one pass", {}, [&] { reef::merge_largest(entries, others, kLargest); }, {}}},
                            kMergeRounds, 2.0 * kLargest),
                    "ns");
}

}  // namespace

int main() {
  at::set_num_threads(1);
  reef::bench::keep_pages();
  select();
  merge();
}
