#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <cstdio>

#include "reef/reef.h"

int main() {
  reef::Ledger ledger;
  torch::nn::Linear net(64, 8);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  ledger.watch(*net);
  ledger.watch(optimizer);
  net->forward(torch::randn({16, 64})).pow(2).mean().backward();
  optimizer.step();
  std::printf("%s", ledger.table().c_str());
  const bool counted = ledger.live()[reef::Category::kOptimizerState] == 2 * (64 * 8 + 8) * 4;
  return counted ? 0 : 1;
}
