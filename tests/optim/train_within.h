#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "reef/budget.h"
#include "reef/gradient_release.h"

namespace reef::optim {

inline constexpr std::uint64_t kTrainedElements = 8 * 128 * 129;

/// The parameters of eight layers after three steps of AdamW; with a budget of `room_bytes` beyond what is
/// alive at the beginning, or without one (0).
inline std::vector<at::Tensor> train_within(StateFormat format, std::uint64_t room_bytes,
                                            bool release_gradients = false) {
  torch::manual_seed(0);
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(128, 128));
  AdamW optimizer(net->parameters(), AdamWOptions(1e-2).state(format));
  std::optional<GradientRelease> release;
  if (release_gradients) release.emplace(optimizer);
  std::optional<Budget> budget;
  if (room_bytes > 0) {
    budget.emplace(std::uint64_t{1} << 40, std::vector<const torch::nn::Module*>{net.get()});
    budget->set_bytes(budget->use().live_bytes + room_bytes);
  }
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    net->forward(torch::full({16, 128}, 0.1 * (step + 1))).pow(2).mean().backward();
    optimizer.step();
  }
  if (budget) {
    EXPECT_GT(budget->use().evictions, 0U);
    budget->end();
  }
  std::vector<at::Tensor> found;
  for (const at::Tensor& p : net->parameters()) found.push_back(p.detach().clone());
  return found;
}

}  // namespace reef::optim
