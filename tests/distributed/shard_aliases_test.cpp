// Whichever tensor shares a parameter's memory: who reads it after a step finds what the step has made, who
// writes it on all ranks alike writes the parameter, and who accesses it without an operator is refused until
// it is current.
#include "distributed/shard_net.h"

namespace reef::shard_tests {
namespace {

torch::nn::Linear layer_of(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(3);
  torch::nn::Linear layer(256, 40);
  layer->to(dtype);
  return layer;
}

struct Row {
  const char* name;
  bool offload = false;
  bool mixed = false;
};
constexpr Row kRows[] = {
    {"plain"}, {"offload", true}, {"masters", false, true}, {"masters, offload", true, true}};

struct Training {
  torch::nn::Linear layer = layer_of();
  Tensor older = layer->weight.detach();  ///< of the memory that the module had
  std::unique_ptr<Shard> shard;
  std::unique_ptr<torch::optim::SGD> optimizer;
  Training(Stage stage, const Row& row) {
    ShardOptions options{.stage = stage, .offload = row.offload};
    if (row.mixed) options.mixed_precision = MixedPrecision{};
    shard = std::make_unique<Shard>(reef::shard(*layer, group(), options));
    optimizer = std::make_unique<torch::optim::SGD>(shard->parameters(), 0.5);
  }
  void step() {
    optimizer->zero_grad();
    const Tensor x = torch::ones({2, 256}, layer->weight.scalar_type()) * (rank() + 1);
    layer->forward(x).sum().backward();
    optimizer->step();
  }
};

void in_every_way(const std::function<void(Stage, const Row&, const std::string&)>& test) {
  for (const Stage stage : kStages) {
    for (const Row& row : kRows)
      test(stage, row, std::string(row.name) + ", stage " + std::to_string(static_cast<int>(stage)));
  }
}

TEST(ShardAliases, WhoReadsAfterAStepFindsWhatItHasMade) {
  in_every_way([](Stage stage, const Row& row, const std::string& text) {
    Training training(stage, row);
    const Tensor view = training.layer->weight.detach().select(0, 3);
    for (int step = 0; step < 3; ++step) {
      training.step();
      const Tensor seen = view.clone();
      const Tensor data = training.layer->weight.variable_data().add(0);
      training.shard->gather();
      EXPECT_TRUE(torch::equal(seen, training.layer->weight.detach().select(0, 3))) << text;
      EXPECT_TRUE(torch::equal(data, training.layer->weight.detach())) << text;
    }
  });
}

// Some elements only: the others keep the bits of their masters.
TEST(ShardAliases, WhoWritesAfterAStepWritesTheParameter) {
  in_every_way([](Stage stage, const Row& row, const std::string& text) {
    Training written(stage, row), expected(stage, row);
    for (int step = 0; step < 2; ++step) {
      written.step();
      expected.step();
      {
        const torch::NoGradGuard no_grad;
        written.layer->weight.variable_data().select(1, 5).fill_(0.25);
        expected.layer->weight.select(1, 5).fill_(0.25);
        written.layer->bias.variable_data().clamp_(-1e6, 1e6);  // changes nothing
      }
      EXPECT_TRUE(torch::equal(written.layer->weight.detach(), expected.layer->weight.detach())) << text;
    }
    const StateDict found = written.shard->full_state_dict();
    const StateDict want = expected.shard->full_state_dict();
    for (const auto& entry : found) EXPECT_TRUE(torch::equal(entry.value(), want.at(entry.key()))) << text;
    EXPECT_TRUE((found.at("weight").select(1, 5) == 0.25).all().item<bool>()) << text;
  });
}

TEST(ShardAliases, WithoutAnOperatorIsRefusedUntilItIsCurrent) {
  in_every_way([](Stage stage, const Row& row, const std::string& text) {
    if (stage == Stage::kReplicate && !row.offload && !row.mixed) return;
    Training training(stage, row);
    training.step();
    EXPECT_THROW(training.layer->weight.data_ptr(), c10::Error) << text;
    EXPECT_THROW(training.layer->bias.detach().const_data_ptr(), c10::Error) << text;
    training.shard->gather();
    EXPECT_NO_THROW(training.layer->weight.data_ptr()) << text;
    training.layer->forward(torch::ones({1, 256}, training.layer->weight.scalar_type()));
    training.step();
    training.shard.reset();
    EXPECT_THROW(training.layer->weight.data_ptr(), c10::Error) << text;
  });
}

// Inside a budget, too, whose pages leave and come back meanwhile.
TEST(ShardAliases, APageThatComesBackIsStillRefused) {
  for (const Addresses addresses : {Addresses::kGo, Addresses::kAutomatic}) {
    Training training(Stage::kOptimizer, kRows[0]);
    Budget budget(std::uint64_t{1} << 40, std::vector<const torch::nn::Module*>{training.layer.ptr().get()},
                  {.device = c10::kCPU, .tiers = {}, .addresses = addresses});
    training.step();
    EXPECT_THROW(training.layer->weight.data_ptr(), c10::Error);
    budget.set_bytes(budget.use().live_bytes - 80000);
    EXPECT_GT(budget.use().evictions, 0);
    budget.set_bytes(std::uint64_t{1} << 40);
    EXPECT_THROW(training.layer->weight.data_ptr(), c10::Error);
    training.shard->gather();
    EXPECT_NO_THROW(training.layer->weight.data_ptr());
  }
}

// Evaluation between the steps, without gradients in either of LibTorch's ways.
TEST(ShardAliases, InferenceModeAfterAStep) {
  in_every_way([](Stage stage, const Row& row, const std::string& text) {
    Training training(stage, row);
    for (int step = 0; step < 3; ++step) {
      training.step();
      const Tensor x = torch::ones({1, 256}, training.layer->weight.scalar_type());
      Tensor evaluated;
      {
        const c10::InferenceMode inference;
        evaluated = training.layer->forward(x);
      }
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(training.layer->forward(x), evaluated.clone())) << text;
    }
  });
}

}  // namespace
}  // namespace reef::shard_tests
