// What the ledger says of real programs, against sums that can be done by hand.
#include "reef/ledger.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
#include <thread>
#include <vector>

#include "reef/error.h"
#include "support/forked_children.h"

namespace reef {
namespace {

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const auto& t : tensors) bytes += static_cast<std::int64_t>(t.storage().nbytes());
  return bytes;
}

torch::nn::Sequential small_net() {
  return torch::nn::Sequential(torch::nn::Linear(64, 256), torch::nn::GELU(),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({256})),
                               torch::nn::Linear(256, 64));
}

std::vector<at::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& p : module.parameters()) {
    if (p.grad().defined()) result.push_back(p.grad());
  }
  return result;
}

class LedgerTest : public ::testing::Test {
 protected:
  Ledger ledger;
  std::int64_t live(Category category) const { return ledger.live()[category]; }

  // The two counts of the same truth, and the sum of the parts.
  void expect_sources_agree() const { EXPECT_EQ(ledger.live().total(), allocator_live_bytes()); }
};

TEST_F(LedgerTest, CountsWhatATensorAsksFor) {
  for (const std::int64_t elements : {1, 7, 64, 1000, 1 << 20}) {
    const std::int64_t before = ledger.live().total();
    at::Tensor t = at::empty({elements}, at::kFloat);
    EXPECT_EQ(ledger.live().total() - before, elements * 4);
    expect_sources_agree();
    t.reset();
    EXPECT_EQ(ledger.live().total(), before);
  }
  EXPECT_NO_THROW(at::empty({0}));
}

TEST_F(LedgerTest, ViewsAndInPlaceOperatorsOwnNothing) {
  at::Tensor t = at::zeros({128, 128});
  const std::int64_t before = ledger.live().total();
  const at::Tensor view = t.view({-1}).narrow(0, 5, 100).as_strided({10}, {3});
  t.add_(1).mul_(2).t();
  EXPECT_EQ(ledger.live().total(), before);
  t.reset();  // the view keeps the whole block
  EXPECT_EQ(ledger.live().total(), before);
}

TEST_F(LedgerTest, SetAndResizeMoveWholeBlocks) {
  const std::int64_t before = ledger.live().total();
  at::Tensor a = at::empty({1000});
  at::Tensor b = at::empty({10});
  b.set_(a);  // the ten floats of b are freed
  EXPECT_EQ(ledger.live().total() - before, 4000);
  a.reset();
  EXPECT_EQ(ledger.live().total() - before, 4000);
  b.resize_({3000});
  EXPECT_EQ(ledger.live().total() - before, 12000);
  b.reset();
  EXPECT_EQ(ledger.live().total(), before);
}

TEST_F(LedgerTest, ForeignMemoryIsNotCounted) {
  const std::int64_t before = ledger.live().total();
  std::vector<float> own(1000);
  const at::Tensor t = torch::from_blob(own.data(), {1000});
  ledger.mark(t, Category::kParameter);
  EXPECT_EQ(ledger.live().total(), before);
}

TEST_F(LedgerTest, CategoriesOfATrainingStepAreTheSumsOfItsTensors) {
  auto net = small_net();
  const auto parameters = net->parameters();
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-3));
  ledger.watch(*net);
  ledger.watch(optimizer);
  const std::int64_t parameter_bytes = bytes_of(parameters);
  EXPECT_EQ(live(Category::kParameter), parameter_bytes);
  EXPECT_EQ(live(Category::kGradient), 0);
  const std::int64_t other = live(Category::kOther);

  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = torch::randn({32, 64});
    EXPECT_EQ(live(Category::kActivation), 0);
    at::Tensor loss = net->forward(x).pow(2).mean();
    EXPECT_GT(live(Category::kActivation), 32 * 256 * 4);  // at least what GELU saved
    loss.backward();
    EXPECT_EQ(live(Category::kGradient), parameter_bytes);
    EXPECT_EQ(bytes_of(gradients(*net)), parameter_bytes);
    optimizer.step();
    EXPECT_EQ(live(Category::kOptimizerState), 2 * parameter_bytes);
    optimizer.zero_grad();
    EXPECT_EQ(live(Category::kGradient), 0);
    loss.reset();
    EXPECT_EQ(live(Category::kActivation), 0);
    EXPECT_EQ(live(Category::kOther), other + 32 * 64 * 4);  // the batch
    expect_sources_agree();
  }
  EXPECT_EQ(ledger.peak_by_category()[Category::kGradient], parameter_bytes);
  EXPECT_EQ(ledger.peak_by_category()[Category::kOptimizerState], 2 * parameter_bytes);
}

// Each of torch's optimizers: what its state holds per parameter byte, as its own paper or header says.
struct OptimizerRow {
  const char* name;
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)> make;
  std::int64_t state_copies;
};

TEST_F(LedgerTest, StateOfEveryTorchOptimizer) {
  namespace o = torch::optim;
  const std::vector<OptimizerRow> rows{
      {"SGD", [](auto p) { return std::make_unique<o::SGD>(p, o::SGDOptions(0.1)); }, 0},
      {"SGD momentum", [](auto p) { return std::make_unique<o::SGD>(p, o::SGDOptions(0.1).momentum(0.9)); },
       1},
      {"Adam amsgrad", [](auto p) { return std::make_unique<o::Adam>(p, o::AdamOptions(0.1).amsgrad(true)); },
       3},
      {"AdamW", [](auto p) { return std::make_unique<o::AdamW>(p, o::AdamWOptions(0.1)); }, 2},
      {"RMSprop",
       [](auto p) { return std::make_unique<o::RMSprop>(p, o::RMSpropOptions(0.1).momentum(0.9)); }, 2},
      {"Adagrad", [](auto p) { return std::make_unique<o::Adagrad>(p, o::AdagradOptions(0.1)); }, 1},
  };
  for (const auto& row : rows) {
    SCOPED_TRACE(row.name);
    Ledger fresh;
    auto net = small_net();
    auto optimizer = row.make(net->parameters());
    fresh.watch(*net);
    fresh.watch(*optimizer);
    for (int step = 0; step < 2; ++step) {
      net->forward(torch::randn({4, 64})).sum().backward();
      optimizer->step();
      EXPECT_EQ(fresh.live()[Category::kOptimizerState], row.state_copies * bytes_of(net->parameters()));
    }
  }
}

TEST_F(LedgerTest, GradientsThatAutogradCannotKeepAreCopiesOfItsOwn) {
  // sum() hands the leaf an expanded scalar, which is copied; a second backward adds in place.
  at::Tensor leaf = torch::ones({1000}, torch::requires_grad());
  leaf.sum().backward();
  EXPECT_EQ(live(Category::kGradient), 4000);
  leaf.sum().backward();
  EXPECT_EQ(live(Category::kGradient), 4000);
  leaf.mutable_grad().reset();
  EXPECT_EQ(live(Category::kGradient), 0);
}

TEST_F(LedgerTest, TiedParametersCountOnce) {
  auto embedding = torch::nn::Embedding(50, 32);
  ledger.watch(*embedding);
  const at::Tensor h = embedding(torch::arange(10));
  torch::matmul(h, embedding->weight.t()).sum().backward();
  EXPECT_EQ(live(Category::kParameter), 50 * 32 * 4);
  EXPECT_EQ(live(Category::kGradient), 50 * 32 * 4);
}

TEST_F(LedgerTest, FreedGraphsGiveEverythingBack) {
  auto net = small_net();
  ledger.watch(*net);
  const std::int64_t before = ledger.live().total();
  for (int i = 0; i < 5; ++i) net->forward(torch::randn({16, 64}));  // graphs dropped without backward
  EXPECT_EQ(ledger.live().total(), before);
  {
    const torch::NoGradGuard no_grad;
    const at::Tensor out = net->forward(torch::randn({16, 64}));
    EXPECT_EQ(live(Category::kActivation), 0);  // nothing is recorded
  }
  EXPECT_EQ(ledger.live().total(), before);
}

TEST_F(LedgerTest, ExceptionsLeaveTheBooksWhole) {
  const std::int64_t before = ledger.live().total();
  EXPECT_THROW(at::empty({2, 3}).matmul(at::empty({2, 3})), c10::Error);
  EXPECT_EQ(ledger.live().total(), before);
  const at::Tensor outside = at::empty({10});  // born outside an operator of a recorded computation
  EXPECT_EQ(live(Category::kActivation), 0);
}

TEST_F(LedgerTest, PeakNamesTheOperatorAndItsBreakdownSumsToIt) {
  ledger.reset_peak();
  const std::int64_t before = ledger.live().total();
  at::mm(at::empty({256, 16}), at::empty({16, 256}));
  const Peak peak = ledger.peak();
  EXPECT_EQ(peak.op, "aten::mm");
  EXPECT_EQ(peak.bytes.total() - before, 2 * 256 * 16 * 4 + 256 * 256 * 4);
  EXPECT_EQ(ledger.live().total(), before);
  ledger.reset_peak();
  EXPECT_EQ(ledger.peak().bytes.total(), before);
  EXPECT_EQ(ledger.peak().op, "");
}

TEST_F(LedgerTest, BackwardIsNamed) {
  at::Tensor w = torch::randn({512, 512}, torch::requires_grad());
  at::Tensor x = torch::randn({4, 512}, torch::requires_grad());
  at::Tensor loss = torch::mm(x, w).sum();
  ledger.reset_peak();
  loss.backward();
  EXPECT_EQ(ledger.peak().op, "aten::mm (backward)");
}

TEST_F(LedgerTest, ScopesDecideTheCategory) {
  const std::int64_t before = live(Category::kCommunication);
  at::Tensor buffer;
  {
    const CategoryScope outer(Category::kOptimizerState);
    {
      const CategoryScope inner(Category::kCommunication);
      buffer = at::empty({100});
    }
    const at::Tensor state = at::empty({10});
    EXPECT_EQ(live(Category::kOptimizerState), 40);
  }
  EXPECT_EQ(live(Category::kCommunication) - before, 400);
  ledger.mark(buffer, Category::kParameter);
  EXPECT_EQ(live(Category::kCommunication), before);
  EXPECT_EQ(live(Category::kParameter), 400);
}

TEST_F(LedgerTest, SeveralLedgersShareWhatLivesAndKeepTheirOwnPeaks) {
  at::Tensor big = at::empty({1 << 20});
  Ledger second;
  EXPECT_EQ(second.live(), ledger.live());
  big.reset();
  EXPECT_EQ(second.peak().bytes.total() - second.live().total(), 4 << 20);
  second.reset_peak();
  EXPECT_EQ(second.peak().bytes.total(), second.live().total());
  EXPECT_GE(ledger.peak().bytes.total(), second.live().total() + (4 << 20));
}

TEST_F(LedgerTest, ThreadsAllocateAndFreeForEachOther) {
  const std::int64_t before = ledger.live().total();
  std::vector<std::thread> threads;
  std::vector<std::promise<at::Tensor>> made(4);
  threads.reserve(made.size());
  for (auto& promise : made) {
    threads.emplace_back([&promise] {
      for (int i = 1; i < 2000; ++i) at::empty({i});
      promise.set_value(at::empty({1000}));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ledger.live().total() - before, 4 * 4000);
  for (auto& promise : made) promise.get_future().get().reset();
  EXPECT_EQ(ledger.live().total(), before);
  expect_sources_agree();
}

TEST_F(LedgerTest, TimelineEndsWhereTheBooksStand) {
  auto net = small_net();
  ledger.watch(*net);
  ledger.start_timeline();
  net->forward(torch::randn({8, 64})).sum().backward();
  const Timeline timeline = ledger.stop_timeline();
  ASSERT_EQ(timeline.devices.at(0), "cpu");
  EXPECT_EQ(bytes_after(timeline, 0, timeline.events.size()), ledger.live());
  EXPECT_EQ(timeline.events_dropped, 0);
  EXPECT_GT(timeline.events.size(), 10U);
  EXPECT_GE(timeline.duration_nanoseconds, timeline.events.back().nanoseconds);
}

TEST_F(LedgerTest, ABoundedTimelineSaysWhatItDropped) {
  ledger.start_timeline(3);
  for (int i = 0; i < 5; ++i) at::empty({10});
  const Timeline timeline = ledger.stop_timeline();
  EXPECT_EQ(timeline.events.size(), 3U);
  EXPECT_EQ(timeline.events_dropped, 7);
}

TEST_F(LedgerTest, RefusesWithASentence) {
  EXPECT_THROW(ledger.stop_timeline(), ConfigError);
  EXPECT_THROW(ledger.live(c10::Device(c10::kCUDA, 16)), ConfigError);
  EXPECT_THROW(ledger.peak(c10::kMeta), ConfigError);
}

TEST_F(LedgerTest, TableShowsEveryCategory) {
  const at::Tensor t = at::empty({1 << 20});
  const std::string table = ledger.table();
  for (std::size_t i = 0; i < kCategories; ++i) {
    EXPECT_NE(table.find(name(static_cast<Category>(i))), std::string::npos);
  }
  EXPECT_NE(table.find("cpu"), std::string::npos);
}

TEST_F(LedgerTest, CountsACudaDeviceByItsOwnStatistics) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no CUDA device";
  const c10::Device device(c10::kCUDA, 0);
  const std::int64_t before = ledger.live(device).total();
  const at::Tensor t = at::empty({1000}, at::TensorOptions(device));
  EXPECT_EQ(ledger.live(device).total() - before, 4000);
}

// LibTorch's lock for observers, which other threads hold most of the time here, is taken by a backward pass:
// a child in which nobody is left to release it ends when it is about to train, and no child hangs.
TEST_F(LedgerTest, NoForkedChildWaitsForAnObserversLock) {
  if (!kForkedChildrenMayAllocate) GTEST_SKIP() << kForkedChildrenMayHang;
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!over) const at::ThreadLocalStateGuard takes_it{at::ThreadLocalState()};
    });
  }
  const at::Tensor parameter = torch::ones({2}, at::requires_grad());
  std::vector<pid_t> children;
  for (int i = 0; i < 30; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      (parameter * parameter).sum().backward();
      ::_exit(parameter.grad().sum().item<float>() == 4 ? 0 : 1);
    }
    children.push_back(child);
  }
  over = true;
  for (std::thread& thread : threads) thread.join();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  for (const pid_t child : children) {
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(child, &status, WNOHANG)) == 0 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (ended == 0) {
      ADD_FAILURE() << "a child hangs";
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      continue;
    }
    const bool is_right = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    EXPECT_TRUE(is_right || (WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT)) << status;
  }
}

}  // namespace
}  // namespace reef
