// What goes wrong under a budget ends in one error, and everything is whole afterwards.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "budget/deep_net.h"
#include "reef/budget.h"
#include "reef/error.h"
#include "reef/optim.h"
#include "support/environment.h"

namespace reef {
namespace {

using namespace test;

// Where a tensor that is away has no address; budget_addresses_test.cpp is of the other way.
struct BudgetErrors : testing::Test {
  BudgetErrors() { torch::manual_seed(0); }
  test::Environment addresses{"REEF_ADDRESSES", "go"};
};

TEST_F(BudgetErrors, AWorkingSetThatDoesNotFitIsNamedAndTrainingGoesOnWithMore) {
  torch::nn::Sequential net = deep_net();
  torch::nn::Sequential twin = deep_net();
  put(copies(*net), *twin);
  Budget budget(kMany, {net.get()});
  const std::uint64_t alive = budget.use().live_bytes;
  budget.set_bytes(alive);
  const at::Tensor wide = torch::ones({64, 64}).requires_grad_();
  try {
    // A matrix product of 1 MiB: more than all that could leave.
    torch::matmul(wide.repeat({256, 1}), wide);
    FAIL() << "no error";
  } catch (const BudgetError& error) {
    const std::string text = message_of(error);
    EXPECT_NE(text.find(" out of memory."), std::string::npos) << text;
    EXPECT_NE(text.find("operator aten::"), std::string::npos) << text;
    EXPECT_GT(error.smallest_budget_bytes(), alive);
    budget.set_bytes(error.smallest_budget_bytes());
  }
  budget.set_bytes(kMany);
  sgd_step(net);
  sgd_step(twin);
  budget.end();
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(net->parameters()[i], twin->parameters()[i]));
  }
}

// As cuDNN does, which tries its algorithms one after another: with the memory for it 1, else 2.
at::Tensor with_or_without_memory(const at::Tensor& like) {
  try {
    return at::ones_like(like) + torch::zeros({1 << 20}).sum();
  } catch (const c10::OutOfMemoryError&) {
    return at::full_like(like, 2);
  }
}
TORCH_LIBRARY(reef_budget_fallback_test, m) {
  m.def("with_or_without_memory(Tensor like) -> Tensor");
  m.impl("with_or_without_memory", c10::DispatchKey::CPU, &with_or_without_memory);
}

TEST_F(BudgetErrors, AnOperatorThatGoesOnWithLessMemoryIsNoSilentOtherResult) {
  for (const char* addresses_are : {"go", "stay"}) {
    const test::Environment way("REEF_ADDRESSES", addresses_are);
    const at::Tensor like = torch::ones({1000});
    const auto call = [&] {
      return c10::Dispatcher::singleton()
          .findSchemaOrThrow("reef_budget_fallback_test::with_or_without_memory", "")
          .typed<at::Tensor(const at::Tensor&)>()
          .call(like);
    };
    BudgetOptions options;
    options.strict = true;
    Budget budget(kMany, at::TensorList(like), options);
    EXPECT_EQ(call().sum().item<float>(), 1000);
    budget.set_bytes(budget.use().live_bytes + (1 << 20));
    try {
      const at::Tensor other = call();
      other.sum();
      ADD_FAILURE() << "computed " << other[0] << " where addresses " << addresses_are;
    } catch (const BudgetError& error) {
      EXPECT_NE(message_of(error).find("went on with less"), std::string::npos) << message_of(error);
      EXPECT_GT(error.smallest_budget_bytes(), 4 << 20);
    }
    budget.set_bytes(kMany);
    EXPECT_EQ(call().sum().item<float>(), 1000) << "the next is right";
    // Whoever tries it outside of operators is told at once, and knows.
    budget.set_bytes(budget.use().live_bytes + (1 << 20));
    EXPECT_THROW(torch::zeros({1 << 20}), BudgetError);
    EXPECT_EQ(torch::ones({10}).sum().item<float>(), 10);
  }
}

TEST_F(BudgetErrors, AnEvictedTensorIsNeverReadByAccident) {
  const at::Tensor tensor = torch::ones({1000});
  Budget budget(kMany, at::TensorList(tensor));
  const std::uint64_t others = budget.use().live_bytes - tensor.nbytes();
  budget.set_bytes(others + 100);
  EXPECT_EQ(budget.use().evictions, 1);
  EXPECT_THROW(tensor.const_data_ptr<float>(), c10::Error);
  EXPECT_THROW(tensor.mutable_data_ptr<float>(), c10::Error);
  budget.set_bytes(kMany);
  EXPECT_EQ(tensor.sum().item<float>(), 1000);
  EXPECT_EQ(*tensor.const_data_ptr<float>(), 1);
}

TEST_F(BudgetErrors, WhatIsPinnedStaysWhereItIs) {
  const at::Tensor tensor = torch::ones({1000});
  Budget budget(kMany, at::TensorList(tensor));
  pin(tensor);
  const void* data = tensor.const_data_ptr();
  EXPECT_THROW(budget.set_bytes(budget.use().live_bytes - 1), BudgetError);
  EXPECT_EQ(budget.use().budget_bytes, kMany) << "the old budget stays";
  EXPECT_EQ(tensor.const_data_ptr(), data);
  unpin(tensor);
  EXPECT_NO_THROW(budget.set_bytes(budget.use().live_bytes - 1));
  EXPECT_EQ(budget.use().evictions, 1);
}

TEST_F(BudgetErrors, WholeTensorsAreReadThroughPointers) {
  torch::nn::Sequential net = deep_net();
  Budget budget(kMany, {net.get()});
  const std::uint64_t alive = budget.use().live_bytes;
  const std::uint64_t tight = alive - alive / 2;
  budget.set_bytes(tight);
  const auto read_all = [&] {
    for (const auto& parameter : net->named_parameters()) parameter.value().const_data_ptr();
  };
  try {
    read_all();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(message_of(error).find(".weight': its memory is not in use"), std::string::npos)
        << message_of(error);
  }
  {
    const WholeTensors whole = budget.whole({net.get()});
    EXPECT_EQ(budget.use().live_bytes, alive);
    EXPECT_GE(whole.bytes() + tight, alive);
    EXPECT_NO_THROW(read_all());
  }
  EXPECT_LE(budget.use().live_bytes, tight);
}

TEST_F(BudgetErrors, WhatOptimizersKeepIsWholeToo) {
  const auto states_are_read = [](torch::nn::Sequential& net, torch::optim::Optimizer& optimizer,
                                  int states) {
    net->forward(torch::ones({64, 64})).pow(2).mean().backward();
    optimizer.step();
    Budget budget(kMany, {net.get()});
    net->forward(torch::ones({64, 64})).pow(2).mean().backward();
    optimizer.step();
    const WholeTensors whole = budget.whole({net.get()}, {&optimizer});
    const std::uint64_t weights = 8 * 64 * 64 * 4;  // biases are too small to be pages
    EXPECT_GE(whole.bytes(), weights * static_cast<std::uint64_t>(1 + states));
  };
  torch::nn::Sequential net = deep_net();
  torch::optim::AdamW theirs(net->parameters());
  states_are_read(net, theirs, 2);
  optim::AdamW ours(net->parameters(), optim::AdamWOptions(1e-3));
  states_are_read(net, ours, 2);
}

// A composite operator, which keeps a pointer to its argument and one to what it has made over other
// operators.
at::Tensor kept(const at::Tensor& x, const std::vector<at::Tensor>& more) {
  const at::Tensor made = x * 2;
  const auto* const first = x.const_data_ptr<float>();
  const auto* const second = made.const_data_ptr<float>();
  at::Tensor sum = torch::zeros({});
  for (const at::Tensor& other : more) sum = sum + (other * 2).sum();
  return sum + *first + *second;
}
TORCH_LIBRARY(reef_budget_test, m) { m.def("kept", &kept); }

TEST_F(BudgetErrors, WhatCallsOperatorsKeepsWhatItWasGiven) {
  constexpr std::int64_t kElements = 10'000;
  const auto tensors = [&](int count) {
    std::vector<at::Tensor> all;
    for (int i = 0; i < count; ++i) all.push_back(torch::full({kElements}, i + 3.0F).requires_grad_());
    return all;
  };
  const std::vector<at::Tensor> x = tensors(1), more = tensors(6), idle = tensors(6);
  const auto run = [&] {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow("reef_budget_test::kept", "")
        .typed<at::Tensor(const at::Tensor&, const std::vector<at::Tensor>&)>()
        .call(x[0], more)
        .item<float>();
  };
  const float plain = run();
  std::vector<at::Tensor> all = x;
  all.insert(all.end(), more.begin(), more.end());
  all.insert(all.end(), idle.begin(), idle.end());
  Budget budget(kMany, at::TensorList(all));
  const std::uint64_t alive = budget.use().live_bytes;
  int right = 0;
  for (int less = 0; less < 8; ++less) {
    try {
      budget.set_bytes(alive - static_cast<std::uint64_t>(less) * kElements * 4);
      EXPECT_EQ(run(), plain);
      ++right;
    } catch (const c10::Error& error) {
      EXPECT_NE(message_of(error).find("out of memory"), std::string::npos) << message_of(error);
    }
  }
  EXPECT_GT(right, 2);
  EXPECT_GT(budget.use().evictions, 6);
}

// Through a raw pointer, without an operator: in each state in which a page is in memory and in a tier.
TEST_F(BudgetErrors, WhatIsWrittenUnseenIsKept) {
  at::Tensor tensor = torch::ones({1000});
  Budget budget(kMany, at::TensorList(tensor));
  const std::uint64_t others = budget.use().live_bytes - tensor.nbytes();
  const auto leave = [&] {
    budget.set_bytes(others + 100);
    budget.set_bytes(kMany);
  };
  leave();
  EXPECT_EQ(tensor.sum().item<float>(), 1000);  // in memory again, and clean
  tensor.mutable_data_ptr<float>()[7] = 2;
  leave();
  EXPECT_EQ(budget.use().unseen_writes, 1);
  EXPECT_EQ(tensor.sum().item<float>(), 1001);
  leave();
  pin(tensor);
  auto* const data = tensor.mutable_data_ptr<float>();
  EXPECT_EQ(torch::ones({1000}).sum().item<float>(), 1000);
  data[8] = 3;
  unpin(tensor);
  leave();
  EXPECT_EQ(tensor.sum().item<float>(), 1003);
  EXPECT_EQ(budget.use().unseen_writes, 1) << "who pins may write";
}

TEST_F(BudgetErrors, PartsOfSparseTensorsArePages) {
  const auto train = [](std::uint64_t bytes, std::uint64_t* evictions) {
    torch::manual_seed(0);
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(500, 64).sparse(true));
    torch::nn::Linear head(64, 64);
    torch::optim::SGD optimizer(table->parameters(), 0.1);
    Budget budget(kMany, {table.get(), head.get()});
    budget.set_bytes(budget.use().live_bytes + bytes);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      head(table(torch::randint(500, {400}))).pow(2).mean().backward();
      EXPECT_EQ(table->weight.grad().coalesce().to_dense().dim(), 2);
      optimizer.step();
    }
    *evictions = budget.use().evictions;
    budget.end();
    return table->weight.detach().clone();
  };
  std::uint64_t none = 0;
  std::uint64_t some = 0;
  const at::Tensor plain = train(kMany / 2, &none);
  EXPECT_TRUE(torch::equal(train(450'000, &some), plain));
  EXPECT_EQ(none, 0);
  EXPECT_GT(some, 0);
}

TEST_F(BudgetErrors, AStorageThatMayNotBeResizedStays) {
  at::Tensor tensor = torch::ones({1000});
  Budget budget(kMany, at::TensorList(tensor));
  tensor.storage().unsafeGetStorageImpl()->set_resizable(false);  // what numpy() does
  EXPECT_THROW(budget.set_bytes(budget.use().live_bytes - 1), BudgetError);
  EXPECT_EQ(tensor.const_data_ptr<float>()[999], 1);
}

TEST_F(BudgetErrors, AnExceptionInTheMiddleOfAStepLeavesEverythingWhole) {
  torch::nn::Sequential net = deep_net();
  const auto before = copies(*net);
  Budget budget(kMany, {net.get()});
  const std::uint64_t least = budget.use().live_bytes;
  budget.set_bytes(least);
  for (int step = 0; step < 3; ++step) {
    try {
      const at::Tensor x = net->forward(torch::ones({64, 64}));
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("the user's own"); });
      x.sum().backward();
      FAIL();
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find("the user's own"), std::string::npos);
    }
  }
  budget.end();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(net->parameters()[i], before[i]));
}

TEST_F(BudgetErrors, OneBudgetAtATime) {
  Budget first(kMany);
  EXPECT_THROW(Budget{kMany}, ConfigError);
  first.end();
  first.end();
  EXPECT_NO_THROW(Budget{kMany});
}

TEST_F(BudgetErrors, ADeviceWithoutABudgetIsRefused) {
  EXPECT_THROW(Budget(kMany, at::TensorList{}, {.device = c10::Device("meta"), .tiers = {}}), ConfigError);
  EXPECT_NO_THROW(Budget{kMany}) << "the refusal left nothing behind";
}

TEST_F(BudgetErrors, AFullTierIsAnErrorThatSaysWhich) {
  torch::nn::Sequential net = deep_net();
  const auto before = copies(*net);
  Budget budget(kMany, {net.get()}, {.device = c10::kCPU, .tiers = {host_tier(20000)}});
  try {
    budget.set_bytes(budget.use().live_bytes - 60000);
    FAIL() << "no error";
  } catch (const BudgetError& error) {
    EXPECT_NE(message_of(error).find("host"), std::string::npos) << message_of(error);
  }
  budget.end();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(net->parameters()[i], before[i]));
}

TEST_F(BudgetErrors, TwoThreadsTrainInsideOneBudget) {
  const auto train = [](torch::nn::Sequential net) {
    for (int step = 0; step < 20; ++step) sgd_step(net);
    return net;
  };
  torch::nn::Sequential alone = deep_net();
  torch::nn::Sequential first = deep_net();
  torch::nn::Sequential second = deep_net();
  put(copies(*alone), *first);
  put(copies(*alone), *second);
  train(alone);
  Budget budget(kMany, {first.get(), second.get()});
  budget.set_bytes(budget.use().live_bytes + 200000);
  std::thread other([&] { train(second); });
  train(first);
  other.join();
  const BudgetUse use = budget.use();
  EXPECT_LE(use.peak_bytes, use.budget_bytes);
  EXPECT_GT(use.evictions, 0);
  budget.end();
  for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
    EXPECT_TRUE(torch::equal(first->parameters()[i], alone->parameters()[i]));
    EXPECT_TRUE(torch::equal(second->parameters()[i], alone->parameters()[i]));
  }
}

}  // namespace
}  // namespace reef
