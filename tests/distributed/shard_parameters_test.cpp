// Stage::kParameters, beside what shard_test.cpp shows of every stage.
#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>

#include "reef/budget.h"
#include "reef/error.h"
#include "reef/ledger.h"
#include "reef/tier.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

constexpr int kLayers = 6;

std::int64_t width() { return 128 * static_cast<std::int64_t>(size()); }
std::int64_t layer_bytes() { return 4 * width() * width(); }

/// A chain of layers of one size, each a bucket, with what they need and no padding.
torch::nn::Sequential chain() {
  torch::manual_seed(3);
  torch::nn::Sequential net;
  for (int i = 0; i < kLayers; ++i)
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(width(), width()).bias(false)));
  return net;
}

Tensor input(int of_rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * of_rank + step);
  return torch::randn({8, width()}, generator).requires_grad_();  // so that backward needs every layer
}

void train(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, int step, bool looks = false) {
  optimizer.zero_grad();
  net->forward(input(rank(), step)).pow(2).mean().backward();
  if (looks) {
    const torch::NoGradGuard no_grad;
    EXPECT_GT(net->parameters()[0].pow(2).sum().item<double>(), 0);
  }
  optimizer.step();
}

// 12 bytes a parameter over two ranks where nothing stays, less what is used last in forward and first in
// backward; 8 with room for all; between them, what stays is not fetched again.
TEST(ShardParameters, WhatStaysIsNotSentAgain) {
  for (int resident = 0; resident <= kLayers; ++resident) {
    torch::nn::Sequential net = chain();
    Shard sharded = shard(*net, group(),
                          {.stage = Stage::kParameters,
                           .bucket_bytes = layer_bytes(),
                           .resident_bytes = resident * layer_bytes()});
    torch::optim::SGD optimizer(sharded.parameters(), 0.01);
    train(net, optimizer, 0);
    const std::int64_t first = sharded.sent_bytes();
    train(net, optimizer, 1);
    const int kept = std::max(resident, 2);  // at the turn
    const int sent = kLayers + (2 * kLayers - kept);
    EXPECT_EQ(sharded.sent_bytes() - first, sent * (size() - 1) * layer_bytes() / size()) << resident;
  }
}

TEST(ShardParameters, EveryRoomGivesTheSameBits) {
  const Case& adamw = kCases[1];
  Net expected = accumulated(adamw, Ranks::kAlike, Reduction::kMean);
  for (const std::int64_t resident_bytes : {0, 4000, 12000, 20000, 1 << 30}) {
    Net net(7 + rank());
    Shard sharded = shard(
        *net, group(), {.stage = Stage::kParameters, .bucket_bytes = 3000, .resident_bytes = resident_bytes});
    const Optimizer optimizer = adamw.make(sharded.parameters());
    const Tensor idle = torch::tensor(sharded.parameters().empty() ? 1 : 0);
    all_reduce({idle}, group());
    const bool all_step = idle.item<int>() == 0;
    for (int step = 0; step < kSteps; ++step) {
      {
        const torch::NoGradGuard no_grad;  // an evaluation before every step
        net->forward(batch(Ranks::kAlike, rank(), step + 1));
      }
      optimizer->zero_grad();
      net->forward(batch(Ranks::kAlike, rank(), step)).backward();
      {
        const at::AutoGradMode recorded(all_step);  // and a look before it
        EXPECT_GT(net->norm->weight.pow(2).sum().item<double>(), 0);
      }
      optimizer->step();
    }
    expect_same(*net, *expected, "resident " + std::to_string(resident_bytes));
  }
}

// 16 / N bytes a parameter stay. At its highest a step has, beside that and activations, less than eight
// buckets: one that is used and one on its way; of gradients, one that is filled, two that are sent, what the
// other ranks send of those two, and what autograd has just made.
TEST(ShardParameters, AStepsPeakIsTheFormula) {
  const Ledger ledger;
  const std::int64_t before = settled_live_bytes();
  torch::nn::Sequential net = chain();
  Shard sharded = shard(*net, group(), {.stage = Stage::kParameters, .bucket_bytes = layer_bytes()});
  torch::optim::Adam optimizer(sharded.parameters());
  train(net, optimizer, 0);
  train(net, optimizer, 1);
  const std::int64_t kept = 4 * kLayers * layer_bytes() / size();
  EXPECT_EQ(settled_live_bytes() - before, kept);
  optimizer.zero_grad();
  const Tensor x = input(rank(), 2);
  const std::int64_t without_gradients = settled_live_bytes();
  Ledger peak;
  net->forward(x).pow(2).mean().backward();
  const std::int64_t activations = (2 * kLayers + 6) * x.nbytes();
  const std::int64_t received = 2 * (size() - 1) * layer_bytes() / size();
  EXPECT_LE(peak.peak().bytes.total(), without_gradients + kLayers * layer_bytes() / size() +
                                           6 * layer_bytes() + received + activations);
}

// A rank whose memory holds less than the model answers as one that has all of it: its parts, of which
// `spilled` may leave for a disk (on one rank that is the whole model), and two buckets.
TEST(ShardParameters, AModelLargerThanARanksMemoryIsServed) {
  constexpr int kRequests = 4;
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> requests, answers;
  for (int i = 0; i < kRequests; ++i) {
    requests.push_back(input(rank(), i).detach());
    answers.push_back(chain()->forward(requests.back()));
  }
  for (const bool spilled : {false, true}) {
    const std::int64_t before = settled_live_bytes();
    torch::nn::Sequential net = chain();
    Shard sharded = shard(*net, group(), {.stage = Stage::kParameters, .bucket_bytes = layer_bytes()});
    // The backend lets go of what it has broadcast a moment after it says that it has.
    for (int i = 0; i < 5000 && allocator_live_bytes() > before + kLayers * layer_bytes() / size(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::int64_t parts_bytes = (spilled ? 2 : kLayers) * layer_bytes() / size();
    const std::int64_t limit = before + parts_bytes + 2 * layer_bytes() + 6 * requests.front().nbytes();
    EXPECT_TRUE(limit < before + kLayers * layer_bytes() || (size() == 1 && !spilled));
    std::optional<Budget> budget;
    if (spilled) {
      BudgetOptions options;
      options.tiers = {disk_tier({.directory = testing::TempDir(), .capacity_bytes = 1 << 24})};
      budget.emplace(static_cast<std::uint64_t>(limit), sharded.parameters(), options);
    }
    for (int i = 0; i < kRequests; ++i) {
      const Ledger peak;
      EXPECT_TRUE(torch::equal(net->forward(requests[static_cast<std::size_t>(i)]),
                               answers[static_cast<std::size_t>(i)]))
          << spilled << i;
      EXPECT_LE(static_cast<std::int64_t>(peak.peak().bytes.total()), limit) << spilled << i;
    }
    if (spilled) {
      EXPECT_LE(budget->use().peak_bytes, static_cast<std::uint64_t>(limit));
      EXPECT_GT(budget->use().evictions, 0U);
    }
  }
}

// What has been asked for ahead is sent even if its asker ends before it has begun: others may have begun.
TEST(ShardParameters, EndsWithBucketsOnTheirWay) {
  const torch::NoGradGuard no_grad;
  for (int round = 0; round < 100; ++round) {
    torch::nn::Sequential net = chain();
    Shard sharded = shard(*net, group(), {.stage = Stage::kParameters, .bucket_bytes = layer_bytes()});
    net->forward(input(rank(), 0));
    net->forward(input(rank(), 1));  // knows the order by now
    if (rank() != round % size()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(ShardParameters, WhatAProgramWritesIsKept) {
  Net net(7);
  Shard sharded = shard(*net, group(), {.stage = Stage::kParameters, .bucket_bytes = 3000});
  {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : net->parameters()) {
      if (parameter.requires_grad()) parameter.fill_(0.25);
    }
    net->forward(batch(Ranks::kAlike, rank(), 0));  // others come and go
  }
  for (const Tensor& part : sharded.parameters()) EXPECT_TRUE(part.eq(0.25).all().item<bool>());
  const torch::NoGradGuard no_grad;
  for (const Tensor& parameter : net->parameters()) {
    if (parameter.requires_grad()) {
      EXPECT_TRUE(parameter.eq(0.25).all().item<bool>());
    }
  }
}

TEST(ShardParameters, APointerIsRefusedUntilGathered) {
  torch::nn::Sequential net = chain();
  std::vector<Tensor> expected;
  for (const Tensor& parameter : net->parameters()) expected.push_back(parameter.detach().clone());
  {
    Shard sharded = shard(*net, group(), {.stage = Stage::kParameters, .bucket_bytes = layer_bytes()});
    std::string said;
    try {
      net->parameters()[0].data_ptr<float>();
    } catch (const c10::Error& error) {
      said = error.what_without_backtrace();
    }
    EXPECT_NE(said.find("this parameter is divided among the ranks just now"), std::string::npos) << said;
    sharded.gather();
    EXPECT_EQ(*net->parameters()[0].data_ptr<float>(), expected[0].flatten()[0].item<float>());
  }
  // And after the shard is gone, whole.
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(net->parameters()[i], expected[i]));
}

// Less than a step needs: parts and states leave for a tier, and there is no room for what is not needed now.
TEST(ShardParameters, PartsLeaveForATierInsideABudget) {
  const auto run = [](std::uint64_t budget_bytes, std::uint64_t& peak, std::uint64_t& evictions) {
    Budget budget(budget_bytes, std::vector<const torch::nn::Module*>{});
    const auto before = budget.use().live_bytes;
    torch::nn::Sequential net = chain();
    Shard sharded = shard(*net, group(),
                          {.stage = Stage::kParameters,
                           .bucket_bytes = layer_bytes(),
                           .resident_bytes = resident_within(budget_bytes)});
    torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-3));
    budget.reset_use();
    for (int step = 0; step < 4; ++step) train(net, optimizer, step);
    EXPECT_EQ(sharded.resident_bytes(), 0);
    peak = budget.use().peak_bytes - before;
    evictions = budget.use().evictions;
    std::vector<Tensor> found;
    for (const Tensor& part : sharded.parameters()) found.push_back(part.detach().clone());
    return found;
  };
  expect_same_inside_a_budget(run, 60, "parts");
}

struct Trained {
  std::vector<Tensor> parts;
  std::int64_t resident_bytes = 0;
  std::int64_t sent_bytes = 0;   ///< in the last step
  BudgetUse use;                 ///< of the last steps
  std::uint64_t peak_bytes = 0;  ///< of all: when memory is given back differs by a moment
  std::int64_t ledgers_peak_bytes = 0;
};

constexpr int kStepsToSettle = 2 + kLayers;

Trained train_inside(std::uint64_t budget_bytes, std::optional<std::int64_t> resident_bytes,
                     bool looks = false, std::int64_t bytes_between_steps = 0,
                     int steps_to_settle = kStepsToSettle) {
  const std::int64_t before = settled_live_bytes();
  torch::nn::Sequential net = chain();
  Shard sharded =
      shard(*net, group(),
            {.stage = Stage::kParameters, .bucket_bytes = layer_bytes(), .resident_bytes = resident_bytes});
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  train(net, optimizer, 0);
  // The backend lets go of what it has broadcast a moment after it says that it has.
  for (int i = 0; i < 5000 && allocator_live_bytes() > before + 3 * kLayers * layer_bytes() / size(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  BudgetOptions options;
  options.tiers = {disk_tier({.directory = testing::TempDir(), .capacity_bytes = 1 << 26})};
  options.addresses = Addresses::kGo;  // where they stay, the budget counts what small tensors share as one
  Budget budget(static_cast<std::uint64_t>(before) + budget_bytes, sharded.parameters(), options);
  int step = 1;
  const auto train_and_look = [&] {
    train(net, optimizer, step++, looks);
    if (bytes_between_steps == 0) return;
    const torch::NoGradGuard no_grad;  // a page, as it is made of one
    sharded.parameters()[0].flatten().narrow(0, 0, 1).expand({bytes_between_steps / 4}).add(1);
  };
  while (step <= steps_to_settle) train_and_look();
  Trained trained;
  trained.peak_bytes = budget.use().peak_bytes - static_cast<std::uint64_t>(before);
  budget.reset_use();
  const Ledger ledger;
  for (const int last = step + 2; step < last;) {
    const std::int64_t sent = sharded.sent_bytes();
    train_and_look();
    trained.sent_bytes = sharded.sent_bytes() - sent;
  }
  trained.resident_bytes = sharded.resident_bytes();
  trained.use = budget.use();
  trained.use.peak_bytes -= static_cast<std::uint64_t>(before);
  trained.peak_bytes = std::max(trained.peak_bytes, trained.use.peak_bytes);
  trained.ledgers_peak_bytes = static_cast<std::int64_t>(ledger.peak().bytes.total()) - before;
  budget.end();
  for (const Tensor& part : sharded.parameters()) trained.parts.push_back(part.detach().clone());
  return trained;
}

// Without resident_bytes, what the budget leaves is the room, on all ranks alike: with little a step sends
// what it sends without any, with enough what the other stages send, with the same bits, and nothing is
// evicted for it.
TEST(ShardParameters, ABudgetsRoomIsTaken) {
  const Trained least = train_inside(kPlenty, 0);
  const Trained most = train_inside(kPlenty, std::nullopt);
  const auto expect_same_parts = [&](const Trained& trained, std::int64_t row) {
    ASSERT_EQ(trained.parts.size(), least.parts.size());
    for (std::size_t i = 0; i < trained.parts.size(); ++i)
      EXPECT_TRUE(torch::equal(trained.parts[i], least.parts[i])) << row;
  };
  EXPECT_EQ(least.resident_bytes, 0);
  EXPECT_EQ(most.resident_bytes, kLayers * layer_bytes());
  EXPECT_EQ(most.sent_bytes, 2 * kLayers * (size() - 1) * layer_bytes() / size());
  expect_same_parts(most, -1);
  // Its own high-water mark is not disturbed by those who look for room.
  EXPECT_EQ(static_cast<std::int64_t>(least.use.peak_bytes), least.ledgers_peak_bytes);
  for (const std::int64_t layers : {0, 1, 3, 5, 2 * kLayers}) {
    const auto budget_bytes = least.peak_bytes + static_cast<std::uint64_t>(layers * layer_bytes());
    const Trained trained = train_inside(budget_bytes, std::nullopt);
    expect_same_parts(trained, layers);
    EXPECT_LE(trained.use.peak_bytes, budget_bytes);
    const Trained given = train_inside(kPlenty, trained.resident_bytes);
    EXPECT_EQ(trained.sent_bytes, given.sent_bytes) << layers;
    if (layers > kLayers) {
      EXPECT_EQ(trained.use.evictions, 0U);
      EXPECT_EQ(trained.sent_bytes, most.sent_bytes);
    }
    // What is under way between ranks when most is alive differs by some buckets from step to step, on one
    // rank by one, which is left free, and by two if the machine is busy: then what is evicted is given back.
    if (size() == 1 && layers > 0) {
      const std::int64_t fitting_bytes = std::min<std::int64_t>(layers - 1, kLayers) * layer_bytes();
      const auto settles = [&](const Trained& last) {
        return last.use.evictions == 0U && last.resident_bytes >= fitting_bytes;
      };
      // A look at a parameter between backward and the step is no step.
      for (const bool looks : {false, true}) {
        bool settled = !looks && settles(trained);
        for (int attempt = 0; attempt < 4 && !settled; ++attempt) {
          const Trained again = train_inside(budget_bytes, std::nullopt, looks);
          expect_same_parts(again, layers);
          settled = settles(again);
        }
        EXPECT_TRUE(settled) << layers << (looks ? ", looking" : "");
      }
    }
  }
}

// What is gathered, or on its way, is never there together with what is alive between steps: both fit where
// the sum of the most of each does not, so nothing leaves.
TEST(ShardParameters, WhatIsAliveBetweenStepsTakesNoRoom) {
  const auto train = [](std::uint64_t budget_bytes) {
    const std::int64_t between = 3 * kLayers * layer_bytes();
    return train_inside(budget_bytes, std::nullopt, /*looks=*/false, between,
                        /*steps_to_settle=*/6 * kLayers);
  };
  const std::uint64_t peak_bytes = train(kPlenty).peak_bytes;
  const Trained trained = train(peak_bytes + static_cast<std::uint64_t>(layer_bytes() / 4));
  EXPECT_EQ(trained.use.evictions, 0U);
  EXPECT_GT(trained.resident_bytes, 0);
}

}  // namespace
}  // namespace reef::shard_tests
