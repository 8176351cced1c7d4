// LocalUpdates: against one process that takes all ranks' steps and outer steps, one after another.
#include "reef/local_updates.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "local_alone.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "reef/subgroup.h"
#include "support/config_error.h"

namespace reef::shard_tests {
namespace {

using test::config_error;

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const std::int64_t steps : {1, 2, 3, 5}) {
    for (const std::int64_t parts : {1, 2, 3}) {
      if (parts > steps) continue;
      for (const std::int64_t overlap :
           std::set<std::int64_t>{0, std::min<std::int64_t>(1, steps - 1), steps - 1}) {
        const double mixing = overlap > 0 && parts == 2 ? 0.25 : 0;
        const int finished = parts == 2 ? 4 : overlap == 1 ? 6 : -1;
        all.push_back({steps, parts, overlap, mixing, 1, 0, false, finished});
        all.push_back({steps, parts, overlap, mixing, 0.7, 0.9, true, finished});
      }
    }
  }
  all.push_back({3, 1, 0, 0, 0.5, 0, true});
  all.push_back({3, 1, 0, 0, 1, 0.5, false});
  return all;
}
constexpr int kLocalSteps = 9;

// After each local step every parameter of this rank is what it is in one process, whoever is late.
TEST(LocalUpdates, RoundsAreThoseOfOneProcess) {
  const std::vector<Row> all = rows();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Row& row = all[i];
    const bool offload = i / 2 % 2 == 1;
    const Case& tested = kInner[offload ? 1 : 0];
    const std::string text = std::string(tested.name) + ", " + row.text();
    Alone alone(row, tested, size(), 1);
    Net net(7 + rank());
    Shard sharded = shard(*net, group(), {.bucket_bytes = 5000, .offload = offload});
    const Optimizer optimizer = tested.make(sharded.parameters());
    LocalUpdates updates(sharded, row.options());
    for (int taken = 1; taken <= kLocalSteps; ++taken) {
      if (row.overlap > 0) std::this_thread::sleep_for(std::chrono::milliseconds((3 * rank() + taken) % 4));
      step(net, *optimizer, updates, taken);
      alone.step(taken);
      if (taken == row.finished) {
        updates.finish();
        alone.finish();
        EXPECT_EQ(updates.local_step(), 0) << text;
      }
      const std::string when = text + ", step " + std::to_string(taken);
      expect_same(*net, *alone.nets[static_cast<std::size_t>(rank())], when);
    }
    EXPECT_EQ(sharded.sent_bytes(), 0) << text;
    updates.finish();
    alone.finish();
    expect_same(*net, *alone.nets.front(), text + ", at the end");
    expect_same(*alone.nets.back(), *alone.nets.front(), text + ", ranks are alike");
    EXPECT_TRUE(torch::isfinite(net->up->weight).all().item<bool>()) << text;
  }
}

// The mean is that of average_parameters(), bit for bit.
TEST(LocalUpdates, TheMeanIsAverageParameters) {
  Net net(7), expected(7);
  Shard sharded = shard(*net, group(), {.bucket_bytes = 5000, .buffers = Buffers::kMean});
  Shard by_hand = shard(*expected, group(), {.bucket_bytes = 900, .buffers = Buffers::kMean});
  const Optimizer optimizer = kInner[1].make(sharded.parameters());
  const Optimizer own = kInner[1].make(by_hand.parameters());
  LocalUpdates updates(sharded, {.local_steps = 3, .outer_lr = 1, .outer_momentum = 0});
  for (int round = 0; round < 2; ++round) {
    for (const Net& each : {net, expected}) each->scale.fill_(rank() + 0.1 * round);
    {
      const Shard::LocalSums local(by_hand);
      for (int number = 0; number < 3; ++number) {
        own->zero_grad();
        expected->forward(batch(Ranks::kDiffer, rank(), 3 * round + number)).backward();
        own->step();
      }
    }
    by_hand.average_parameters();
    for (int number = 0; number < 3; ++number) step(net, *optimizer, updates, 3 * round + number);
    expect_same(*net, *expected, "round " + std::to_string(round));
    EXPECT_TRUE(torch::equal(net->scale, expected->scale)) << round;
  }
}

// A mean of parameters after each step is synchronous training where nothing is rounded, and within rounding
// where something is (three ranks divide by three).
TEST(LocalUpdates, AMeanAfterEachStepIsSynchronous) {
  const auto layer = [] {
    torch::nn::Linear made(torch::nn::LinearOptions(16, 8).bias(false));
    const torch::NoGradGuard no_grad;
    made->weight.copy_(torch::arange(128).view({8, 16}).remainder(17).sub(8));
    return made;
  };
  const auto input = [](int number) {
    return torch::arange(32, torch::kFloat).view({2, 16}).add(3 * rank() + number).remainder(5).sub(2);
  };
  torch::nn::Linear local = layer(), together = layer();
  Shard sharded = shard(*local, group()), synchronous = shard(*together, group());
  torch::optim::SGD own(sharded.parameters(), torch::optim::SGDOptions(0.25));
  torch::optim::SGD all(synchronous.parameters(), torch::optim::SGDOptions(0.25));
  LocalUpdates updates(sharded, {.local_steps = 1, .outer_lr = 1, .outer_momentum = 0});
  for (int number = 0; number < 5; ++number) {
    own.zero_grad();
    all.zero_grad();
    local->forward(input(number)).sum().backward();
    together->forward(input(number)).sum().backward();
    own.step();
    updates.step();
    all.step();
    EXPECT_TRUE(size() == 3 ? torch::allclose(local->weight, together->weight, 1e-5, 1e-5)
                            : torch::equal(local->weight, together->weight))
        << number;
  }
}

// Copies of several ranks, which train together as ever, at every stage.
TEST(LocalUpdates, CopiesTrainTogetherWithin) {
  if (size() != 4) return;
  ProcessGroupPtr copy, between;
  for (const std::int64_t number : {0, 1}) {
    const ProcessGroupPtr of_copy = subgroup(group(), {2 * number, 2 * number + 1});
    const ProcessGroupPtr of_place = subgroup(group(), {number, number + 2});
    if (rank() / 2 == number) copy = of_copy;
    if (rank() % 2 == number) between = of_place;
  }
  for (const Stage stage : kStages) {
    for (const Row& row : {Row{3, 2, 1, 0.25, 0.7, 0.9, true, 4}, Row{2, 1, 0, 0, 1, 0, false}}) {
      const std::string text = "stage " + std::to_string(static_cast<int>(stage)) + ", " + row.text();
      const Ranks ranks = ranks_at(stage);
      Alone alone(row, kInner[1], 2, 2, ranks);
      Net net(7);
      if (rank() >= 2) {  // every copy begins with the first one's parameters
        const torch::NoGradGuard no_grad;
        for (Tensor parameter : trained(net)) parameter.add_(1);
      }
      Shard sharded = shard(*net, copy, {.stage = stage, .bucket_bytes = 5000});
      const Optimizer optimizer = kInner[1].make(sharded.parameters());
      LocalUpdatesOptions options = row.options();
      options.between_copies = between;
      LocalUpdates updates(sharded, options);
      for (int taken = 1; taken <= kLocalSteps; ++taken) {
        step(net, *optimizer, updates, taken, ranks);
        alone.step(taken);
        if (taken == row.finished) {
          updates.finish();
          alone.finish();
        }
        const StateDict whole = sharded.full_state_dict();
        for (const auto& item : alone.nets[static_cast<std::size_t>(rank() / 2)]->named_parameters()) {
          if (!item.value().requires_grad()) continue;
          EXPECT_TRUE(torch::equal(whole.at(item.key()), item.value()))
              << text << ", step " << taken << ": " << item.key();
        }
      }
      EXPECT_THROW(sharded.refresh(*net), ConfigError);
    }
  }
  Net net(7);
  Shard sharded = shard(*net, copy, {.stage = Stage::kGradients});
  EXPECT_THROW(LocalUpdates(sharded, {.local_steps = 2, .between_copies = group()}),
               ConfigError);  // other parts
  EXPECT_THROW(LocalUpdates(sharded, {.local_steps = rank() == 3 ? 3 : 2, .between_copies = between}),
               ConfigError);  // on all four
  EXPECT_THROW(LocalUpdates(sharded, {.local_steps = 2}), ConfigError);
  Net other(7 + rank() / 2);  // their frozen parameters, too
  Shard of_other = shard(*other, copy);
  EXPECT_THROW(LocalUpdates(of_other, {.local_steps = 2, .between_copies = between}), ConfigError);
}

// A round sends what its exchange takes, and nothing but in outer steps.
TEST(LocalUpdates, BytesAreThoseOfTheExchange) {
  const std::int64_t elements = 96 * 512 * size();
  const std::int64_t others = size() - 1;
  const std::vector<std::pair<Compression, std::int64_t>> bytes = {
      {Compression::kNone, 2 * others * elements / size() * 4},
      {Compression::kBFloat16, 2 * others * elements / size() * 2},
      {Compression::kTopK, others * 8 * ((elements + 99) / 100)}};
  for (const auto& [compression, expected] : bytes) {
    for (const double lr : {1.0, 0.7}) {
      torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(512, 96 * size()).bias(false)),
                                torch::nn::Linear(torch::nn::LinearOptions(96 * size(), 512).bias(false)));
      Shard sharded = shard(*net, group());
      torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(1e-3));
      LocalUpdatesOptions options{
          .local_steps = 4, .outer_lr = lr, .outer_momentum = 0, .compression = compression, .parts = 2};
      if (compression == Compression::kTopK) options.compression_options.density = 0.01;
      LocalUpdates updates(sharded, options);
      for (int number = 1; number <= 8; ++number) {
        optimizer.zero_grad();
        net->forward(torch::ones({1, 512})).sum().backward();
        optimizer.step();
        updates.step();
        EXPECT_EQ(updates.sent_bytes(), number / 2 * expected) << name_of(compression) << ", step " << number;
      }
      EXPECT_EQ(sharded.sent_bytes(), 0);
    }
  }
}

// Masters are what is exchanged, and parameters are those rounded.
TEST(LocalUpdates, MastersAreExchanged) {
  torch::nn::Linear layer(torch::nn::LinearOptions(64, 8).bias(false));
  Shard sharded = shard(*layer, group(), {.mixed_precision = MixedPrecision{}});
  LocalUpdates updates(sharded, {.local_steps = 1, .outer_lr = 0.5, .outer_momentum = 0});
  const torch::NoGradGuard no_grad;
  Tensor master = sharded.parameters().front();
  const Tensor start = master.clone();
  const auto value = [&](int of) {
    torch::manual_seed(static_cast<std::uint64_t>(50 + of));
    return start + torch::randn({8, 64});
  };
  Tensor sum = start - value(0);
  for (int of = 1; of < size(); ++of) sum = sum + (start - value(of));
  const Tensor expected = start.clone().add_(sum / size(), -0.5);
  master.copy_(value(rank()));
  updates.step();
  EXPECT_TRUE(torch::equal(master, expected));
  EXPECT_TRUE(torch::equal(layer->weight, expected.to(at::kBFloat16)));
}

// Inside a budget that does not hold what the outer steps keep: the same bits.
TEST(LocalUpdates, WorksInsideABudget) {
  const BudgetedRun run = [](std::uint64_t bytes, std::uint64_t& peak, std::uint64_t& evictions) {
    Budget budget(bytes, std::vector<const torch::nn::Module*>{});
    const auto before = budget.use().live_bytes;
    torch::manual_seed(3);
    torch::nn::Sequential net;
    for (int i = 0; i < 6; ++i) net->push_back(torch::nn::Linear(256, 256));
    Shard sharded = shard(*net, group(), {.bucket_bytes = 300000});
    torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-3));
    LocalUpdates updates(sharded, {.local_steps = 2, .parts = 2, .overlap_steps = 1});
    for (int number = 0; number < 6; ++number) {
      torch::manual_seed(static_cast<std::uint64_t>(100 * number + rank()));
      optimizer.zero_grad();
      net->forward(torch::randn({64, 256})).pow(2).mean().backward();
      optimizer.step();
      updates.step();
    }
    updates.finish();
    peak = budget.use().peak_bytes - before;
    evictions = budget.use().evictions;
    std::vector<Tensor> found;
    for (const Tensor& parameter : net->parameters()) found.push_back(parameter.detach().clone());
    return found;
  };
  expect_same_inside_a_budget(run, 70, "local updates");
}

// What is kept is counted as optimizer state, and goes when it ends.
TEST(LocalUpdates, MemoryIsWhatItSays) {
  const std::int64_t bytes = std::int64_t{1} << 20;
  torch::nn::Linear layer(torch::nn::LinearOptions(512, bytes / 4 / 512).bias(false));
  const Ledger ledger;
  Shard sharded = shard(*layer, group());
  const auto states = [&] { return ledger.live()[Category::kOptimizerState]; };
  const std::int64_t before = states();
  {
    LocalUpdates updates(sharded, {.local_steps = 1});
    EXPECT_EQ(states() - before, bytes);
    updates.step();
    EXPECT_EQ(states() - before, 2 * bytes);
  }
  EXPECT_EQ(states(), before);
  const LocalUpdates mean(sharded, {.local_steps = 1, .outer_lr = 1, .outer_momentum = 0});
  EXPECT_EQ(states(), before);
}

TEST(LocalUpdates, WhatCannotBeIsRefusedOnAllRanks) {
  Net net(7);
  Shard sharded = shard(*net, group());
  const auto refused = [&](LocalUpdatesOptions options, bool everywhere = true) {
    if (!everywhere && rank() != size() - 1) options = {};
    EXPECT_THROW(LocalUpdates(sharded, options), ConfigError);
  };
  for (const bool everywhere : {true, false}) {
    refused({.local_steps = 0}, everywhere);
    refused({.outer_lr = 0}, everywhere);
    refused({.outer_lr = std::nan("")}, everywhere);
    refused({.outer_momentum = 1}, everywhere);
    refused({.outer_momentum = -0.1}, everywhere);
    refused({.mixing = 1}, everywhere);
    refused({.parts = 0}, everywhere);
    refused({.local_steps = 2, .parts = 3}, everywhere);
    refused({.parts = 49}, everywhere);
    refused({.local_steps = 2, .overlap_steps = 2}, everywhere);
    refused({.overlap_steps = -1}, everywhere);
    refused({.compression_options = {.density = 0.5}}, everywhere);
  }
  if (size() > 1) {
    refused({.local_steps = 2 + rank()});
    refused({.outer_lr = 0.7 + 1e-12 * rank()});
    refused({.outer_momentum = 0.1 * rank()});
    refused({.nesterov = rank() == 0});
    refused({.compression = rank() == 0 ? Compression::kNone : Compression::kBFloat16});
  }
  torch::nn::Linear half(4, 4);
  half->to(torch::kHalf);
  Shard of_half = shard(*half, group());
  EXPECT_THROW(LocalUpdates(of_half, {.compression = Compression::kTopK}), ConfigError);
  const LocalUpdates only(sharded);
  refused({});
  EXPECT_THROW(sharded.refresh(*net), ConfigError);
  EXPECT_THROW(sharded.join([] {}), ConfigError);

  Net offloaded(7);
  Shard with_update = shard(*offloaded, group(), {.offload = true});
  torch::optim::SGD optimizer(with_update.parameters(), torch::optim::SGDOptions(0.1));
  const DelayedUpdate delayed(optimizer, with_update);
  EXPECT_THROW(LocalUpdates{with_update}, ConfigError);
}

// Methods of compression that outer steps do not take, and shards whose steps these are not: on all ranks,
// wherever it is found out.
TEST(LocalUpdates, CompressionsThatCannotBeAreRefused) {
  const auto refused = [&](Shard& sharded, const std::string& text, const LocalUpdatesOptions& options) {
    for (const bool everywhere : {true, false}) {
      const bool is_asked = everywhere || rank() == size() - 1;
      const std::string said =
          config_error([&] { LocalUpdates(sharded, is_asked ? options : LocalUpdatesOptions()); });
      EXPECT_NE(said.find(text), std::string::npos) << "rank " << rank() << ": " << said;
    }
  };
  const auto with = [](Compression compression, double outer_momentum, const CompressionOptions& of = {}) {
    return LocalUpdatesOptions{
        .outer_momentum = outer_momentum, .compression = compression, .compression_options = of};
  };
  Net net(7);
  Shard sharded = shard(*net, group());
  refused(sharded,
          "compression dgc, which has a momentum of its own, and outer_momentum 0.9: give outer_momentum 0",
          with(Compression::kDgc, 0.9));
  refused(sharded, "compression one_bit_adam: give one that gives gradients",
          with(Compression::kOneBitAdam, 0, {.warmup_steps = 3}));
  refused(sharded, "compression auto: give a method", with(Compression::kAuto, 0.9));

  torch::nn::Linear wide(4, 4);
  wide->to(torch::kDouble);
  Shard of_wide = shard(*wide, group());
  refused(of_wide, "compression dgc, and parameter weight is of Double: take another compression",
          with(Compression::kDgc, 0));
  LocalUpdates(of_wide, with(Compression::kTopK, 0.9)).finish();

  torch::nn::Linear half(4, 4);
  half->to(torch::kHalf);
  Shard of_half = shard(*half, group());
  refused(of_half, "parameter weight is of Half, in which what is held back would be rounded",
          with(Compression::kTopK, 0.9));

  torch::nn::Linear by_momentum(4, 4);
  Shard of_momentum =
      shard(*by_momentum, group(),
            {.compression = Compression::kOneBitAdam, .compression_options = {.warmup_steps = 3}});
  const std::string said = config_error([&] { LocalUpdates{of_momentum}; });
  EXPECT_NE(said.find("a shard with compression one_bit_adam, whose optimizer steps by what ranks exchange"),
            std::string::npos)
      << said;
}

// Steps beside the program are not seen, so whatever looks at parameters refuses: what was there before
// stays.
TEST(LocalUpdates, ADelayedUpdateBesideThemIsRefused) {
  Net net(7);
  Shard sharded = shard(*net, group(), {.offload = true});
  torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
  LocalUpdates updates(sharded, {.local_steps = 3});
  step(net, optimizer, updates, 0);
  const OptimizerState state = updates.state();
  {
    const DelayedUpdate delayed(optimizer, sharded);
    const std::vector<std::function<void()>> calls = {
        [&] { updates.step(); }, [&] { updates.finish(); }, [&] { updates.begin_round(); },
        [&] { updates.load_state(state); }, [&] { const LocalUpdates another(sharded); }};
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const std::string said = config_error(calls[i]);
      const bool is_another = i + 1 == calls.size();
      EXPECT_NE(said.find(is_another ? "a shard that has one" : "beside a DelayedUpdate"), std::string::npos)
          << i << ": " << said;
    }
    EXPECT_EQ(updates.local_step(), 1);
  }
  for (int number = 1; number < 3; ++number) step(net, optimizer, updates, number);
  updates.finish();
  Tensor own = torch::nn::utils::parameters_to_vector(parameters_of(net)).detach(), first = own.clone();
  broadcast({first}, group());
  EXPECT_TRUE(torch::equal(own, first));
}

// When it has ended, backward reduces gradients again; ranks that have taken other numbers of steps are told.
TEST(LocalUpdates, EndsAndTellsWhoIsOutOfStep) {
  Net net(7), all(7);
  Shard sharded = shard(*net, group());
  const Optimizer optimizer = kInner[0].make(sharded.parameters());
  {
    LocalUpdates updates(sharded, {.local_steps = 5});
    if (size() > 1) {
      for (int number = 0; number <= rank(); ++number) step(net, *optimizer, updates, number);
      EXPECT_THROW(updates.finish(), ConfigError);
      updates.begin_round();
    }
  }
  sharded.load_state_dict({[&] {
    Net source(7);
    StateDict values;
    for (const auto& item : source->named_parameters()) values.insert(item.key(), item.value().detach());
    for (const auto& item : source->named_buffers()) values.insert(item.key(), item.value());
    return values;
  }()});
  optimizer->zero_grad();
  net->forward(batch(Ranks::kDiffer, rank(), 2)).backward();
  accumulate(all, Ranks::kDiffer, 2);
  for (const auto& item : net->named_parameters()) {
    const Tensor found = item.value().grad(), expected = all->named_parameters()[item.key()].grad();
    ASSERT_EQ(found.defined(), expected.defined()) << item.key();
    EXPECT_TRUE(!found.defined() || torch::equal(found, expected)) << item.key();
  }
}

// Against all cuts: none whose largest part is smaller by more than the largest tensor.
TEST(OuterSchedule, PartsFollowEachOtherAndAreAboutAsLarge) {
  torch::manual_seed(5);
  for (int trial = 0; trial < 300; ++trial) {
    const auto count = torch::randint(1, 8, {1}).item<std::int64_t>();
    std::vector<std::int64_t> elements;
    for (std::int64_t i = 0; i < count; ++i)
      elements.push_back(torch::randint(0, 100, {1}).item<std::int64_t>());
    const auto parts = torch::randint(1, count + 1, {1}).item<std::int64_t>();
    const auto ends = cut_into_parts(elements, static_cast<std::size_t>(parts));
    ASSERT_EQ(ends.size(), static_cast<std::size_t>(parts));
    EXPECT_EQ(ends.back(), elements.size());
    const std::int64_t all = std::accumulate(elements.begin(), elements.end(), std::int64_t{0});
    const std::int64_t largest = *std::max_element(elements.begin(), elements.end());
    for (std::size_t part = 0; part < ends.size(); ++part) {
      const std::size_t first = part == 0 ? 0 : ends[part - 1];
      ASSERT_LT(first, ends[part]);
      const std::int64_t has =
          std::accumulate(elements.begin() + static_cast<std::ptrdiff_t>(first),
                          elements.begin() + static_cast<std::ptrdiff_t>(ends[part]), std::int64_t{0});
      EXPECT_LE(has, all / parts + 2 * largest);
    }
  }
}

}  // namespace
}  // namespace reef::shard_tests
