// LAMB and LARS over parts of parameters: the bits of one process that has the whole ones, in C++.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/optim.h"
#include "reef/part.h"
#include "reef/process_group.h"
#include "reef/shard.h"

namespace reef {
namespace {

using at::Tensor;

const ProcessGroupPtr& group() {
  static const ProcessGroupPtr the_group = init_process_group();
  return the_group;
}
int rank() { return group()->getRank(); }
int size() { return group()->getSize(); }

torch::nn::Sequential net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(40, 70), torch::nn::GELU(), torch::nn::Linear(70, 40));
}
Tensor loss(torch::nn::Sequential& of, int of_rank, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + of_rank));
  return of->forward(torch::randn({4, 40})).pow(2).mean();
}

template <class Rule, class RuleOptions>
void steps_as_one_process(const RuleOptions& options) {
  constexpr int kSteps = 3;
  auto whole = net();
  Rule alone(whole->parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    alone.zero_grad();
    for (int of = 0; of < size(); ++of) loss(whole, of, step).backward();
    for (Tensor& p : whole->parameters()) p.mutable_grad().div_(size());
    alone.step();
  }
  for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kGradients, Stage::kParameters}) {
    auto divided = net();
    Shard sharded = shard(*divided, group(), {.stage = stage, .bucket_bytes = 4096});
    Rule optimizer(sharded.parameters(), options);
    optimizer.norms_over(group());
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      loss(divided, rank(), step).backward();
      optimizer.step();
    }
    const StateDict found = sharded.full_state_dict();
    for (const auto& named : whole->named_parameters()) {
      EXPECT_TRUE(torch::equal(named.value(), found.at(named.key())))
          << named.key() << ", stage " << static_cast<int>(stage);
    }
  }
}

TEST(OptimNorms, AStepOfPartsIsThatOfOneProcess) {
  steps_as_one_process<optim::LAMB>(optim::LAMBOptions(1e-2).weight_decay(0.01));
  steps_as_one_process<optim::LARS>(optim::LARSOptions(1.0).weight_decay(0.01).trust_coefficient(0.02));
}

TEST(OptimNorms, AreRefusedWhereTheyCannotBe) {
  optim::AdamW other({torch::randn({3}).requires_grad_()});
  EXPECT_THROW(other.norms_over(group()), ConfigError);
  Tensor part = torch::randn({256}).requires_grad_();
  set_part(part, {.first = 0, .whole_elements = 1024}, {{32, 32}});
  part.mutable_grad() = torch::randn({256});
  optim::LARS lars({part});
  EXPECT_THROW(lars.norms_over(nullptr), ConfigError);
  const Tensor before = part.detach().clone();
  try {
    lars.step();
    ADD_FAILURE() << "a part was stepped without its whole's norm";
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find("give the optimizer the group"), std::string::npos) << message_of(error);
  }
  EXPECT_TRUE(torch::equal(part, before));
}

}  // namespace
}  // namespace reef
