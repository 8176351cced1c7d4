// LocalUpdates: against one process that takes all ranks' steps and outer steps, one after another.
#include "reef/local_updates.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "distributed/through_file.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "reef/subgroup.h"
#include "shard/outer_schedule.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

struct Row {
  std::int64_t steps, parts, overlap;
  double mixing, lr, momentum;
  bool nesterov;
  int finished = -1;  ///< after so many steps

  bool is_mean() const { return lr == 1 && momentum == 0; }
  LocalUpdatesOptions options() const {
    return {.local_steps = steps,
            .outer_lr = lr,
            .outer_momentum = momentum,
            .nesterov = nesterov,
            .parts = parts,
            .overlap_steps = overlap,
            .mixing = mixing};
  }
  std::string text() const {
    return std::to_string(steps) + " steps in " + std::to_string(parts) + " parts, " +
           std::to_string(overlap) + " later, mixing " + std::to_string(mixing) + ", rate " +
           std::to_string(lr) + ", momentum " + std::to_string(momentum) + (nesterov ? " nesterov" : "") +
           ", finished " + std::to_string(finished);
  }
};

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

/// Whose losses stay finite, whatever an outer step does.
const std::vector<Case> kInner = {
    {"momentum",
     [](std::vector<Tensor> all) {
       return std::make_shared<torch::optim::SGD>(all, torch::optim::SGDOptions(0.01).momentum(0.9));
     }},
    {"torch AdamW", [](std::vector<Tensor> all) {
       return std::make_shared<torch::optim::AdamW>(all, torch::optim::AdamWOptions(1e-3));
     }}};

std::vector<Tensor> trained(const Net& net) {
  std::vector<Tensor> all;
  for (const Tensor& parameter : parameters_of(net)) {
    if (parameter.requires_grad()) all.push_back(parameter);
  }
  return all;
}

/// All copies' nets in one process, which take their steps one after another, and torch's own SGD as the
/// outer optimizer. `ranks_of_copy`: whose gradients a copy adds up.
class Alone {
 public:
  Alone(const Row& row, const Case& tested, int copies, int ranks_of_copy, Ranks ranks = Ranks::kDiffer)
      : row_(row), ranks_of_copy_(ranks_of_copy), ranks_(ranks) {
    for (int copy = 0; copy < copies; ++copy) {
      nets.emplace_back(7);
      optimizers_.push_back(tested.make(parameters_of(nets.back())));
    }
    std::vector<std::int64_t> elements;
    for (const Tensor& parameter : trained(nets.front())) {
      elements.push_back(parameter.numel());
      start_.push_back(parameter.detach().clone().set_requires_grad(true));
    }
    ends_ = cut_into_parts(elements, static_cast<std::size_t>(row.parts));
    sent_.resize(ends_.size());
    outer_ = std::make_unique<torch::optim::SGD>(
        start_,
        torch::optim::SGDOptions(row.lr).momentum(row.momentum).nesterov(row.nesterov && row.momentum > 0));
  }

  void step(int number) {
    for (std::size_t copy = 0; copy < nets.size(); ++copy) {
      optimizers_[copy]->zero_grad();
      for (int of = 0; of < ranks_of_copy_; ++of) {
        const int rank_of = static_cast<int>(copy) * ranks_of_copy_ + of;
        nets[copy]->forward(batch(ranks_, rank_of, number)).backward();
      }
      for (const Tensor& parameter : trained(nets[copy])) {
        if (ranks_of_copy_ > 1 && parameter.grad().defined()) parameter.grad().div_(ranks_of_copy_);
      }
      optimizers_[copy]->step();
    }
    ++step_;
    for (std::size_t part = 0; part < ends_.size(); ++part) {
      const std::int64_t since = step_ - offset(part) - row_.overlap;
      if (row_.overlap > 0 && since >= 0 && since % row_.steps == 0) apply(part, row_.mixing);
    }
    for (std::size_t part = 0; part < ends_.size(); ++part) {
      const std::int64_t since = step_ - offset(part);
      if (since < 0 || since % row_.steps != 0) continue;
      send(part);
      if (row_.overlap == 0) apply(part, row_.mixing);
    }
  }

  void finish() {
    for (std::size_t part = 0; part < ends_.size(); ++part) {
      if (sent_[part]) apply(part, row_.mixing);
      if (differs(part)) {
        send(part);
        apply(part, 0);
      }
    }
    step_ = 0;
  }

  std::vector<Net> nets;

 private:
  std::int64_t offset(std::size_t part) const {
    return row_.steps * static_cast<std::int64_t>(part + 1) / row_.parts;
  }
  std::size_t first(std::size_t part) const { return part == 0 ? 0 : ends_[part - 1]; }
  // Some copy has made something of its own.
  bool differs(std::size_t part) const {
    return step_ > 0 && (step_at_.size() <= part || step_at_[part] != step_ || row_.mixing != 0);
  }
  void send(std::size_t part) {
    const torch::NoGradGuard no_grad;
    std::vector<Tensor> means;
    for (std::size_t i = first(part); i < ends_[part]; ++i) {
      Tensor sum;
      for (const Net& net : nets) {
        const Tensor own = trained(net)[i].detach();
        const Tensor value = row_.is_mean() ? own : start_[i].detach() - own;
        sum = sum.defined() ? sum + value : value.clone();
      }
      means.push_back(sum / static_cast<std::int64_t>(nets.size()));
    }
    sent_[part] = means;
  }
  void apply(std::size_t part, double mixing) {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = first(part); i < ends_[part]; ++i) {
      const Tensor& came = (*sent_[part])[i - first(part)];
      if (row_.is_mean()) {
        start_[i].copy_(came);
      } else {
        start_[i].mutable_grad() = came;
      }
    }
    if (!row_.is_mean()) outer_->step();
    outer_->zero_grad();
    for (const Net& net : nets) {
      for (std::size_t i = first(part); i < ends_[part]; ++i) {
        Tensor own = trained(net)[i];
        own.copy_(mixing == 0 ? start_[i] : torch::add(own * mixing, start_[i], 1 - mixing));
      }
    }
    sent_[part].reset();
    step_at_.resize(ends_.size(), -1);
    step_at_[part] = step_;
  }

  const Row row_;
  const int ranks_of_copy_;
  const Ranks ranks_;
  std::vector<Optimizer> optimizers_;
  std::vector<Tensor> start_;
  std::vector<std::size_t> ends_;
  std::vector<std::optional<std::vector<Tensor>>> sent_;
  std::vector<std::int64_t> step_at_;
  std::unique_ptr<torch::optim::SGD> outer_;
  std::int64_t step_ = 0;
};

/// A step of this rank's batch, and what comes after it.
void step(Net net, torch::optim::Optimizer& optimizer, LocalUpdates& updates, int number,
          Ranks ranks = Ranks::kDiffer) {
  optimizer.zero_grad();
  net->forward(batch(ranks, rank(), number)).backward();
  optimizer.step();
  updates.step();
}

// After each local step every parameter of this rank is what it is in one process.
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

// From any step, by files, to the bits of a run without a break: with what is under way and held back.
TEST(LocalUpdates, GoesOnFromAnyStepOfARound) {
  for (const Compression compression : {Compression::kNone, Compression::kBFloat16, Compression::kTopK}) {
    for (const std::int64_t overlap : {0, 1, 3}) {
      LocalUpdatesOptions options{.local_steps = 4,
                                  .compression = compression,
                                  .parts = 2,
                                  .overlap_steps = overlap,
                                  .mixing = overlap == 1 ? 0.5 : 0};
      if (compression == Compression::kTopK) options.compression_options.density = {{0, 0.5}, {2, 0.01}};
      constexpr int kTaken = 11;
      Net expected(7);
      Shard without_break = shard(*expected, group(), {.bucket_bytes = 5000});
      const Optimizer at_once = kInner[0].make(without_break.parameters());
      LocalUpdates all(without_break, options);
      std::vector<OptimizerState> states, of_optimizer;
      for (int taken = 0; taken < kTaken; ++taken) {
        states.push_back(through_file(all.state()));
        of_optimizer.push_back(through_file(without_break.sharded_optimizer_state(*at_once)));
        step(expected, *at_once, all, taken);
      }
      for (int taken = 0; taken < kTaken; ++taken) {
        const std::string text = std::string(name_of(compression)) + ", " + std::to_string(overlap) +
                                 " later, from " + std::to_string(taken);
        Net net(9 + rank());
        Shard sharded = shard(*net, group(), {.bucket_bytes = 5000});
        const Optimizer optimizer = kInner[0].make(sharded.parameters());
        LocalUpdates updates(sharded, options);
        sharded.load_optimizer_state(*optimizer, {of_optimizer[static_cast<std::size_t>(taken)]});
        updates.load_state(states[static_cast<std::size_t>(taken)]);
        EXPECT_EQ(updates.local_step(), taken) << text;
        {
          const torch::NoGradGuard no_grad;  // no parameters of LocalUpdates
          net->frozen.copy_(expected->frozen);
          net->scale.copy_(expected->scale);
        }
        for (int number = taken; number < kTaken; ++number) step(net, *optimizer, updates, number);
        expect_same(*net, *expected, text);
      }
    }
  }
}

using Change = std::function<void(OptimizerState&)>;

// Whatever is wrong with the state of one rank is told on all, and nothing has changed.
TEST(LocalUpdates, WrongStatesAreRefusedOnAllRanks) {
  Net net(7);
  Shard sharded = shard(*net, group(), {.bucket_bytes = 5000});
  const Optimizer optimizer = kInner[0].make(sharded.parameters());
  LocalUpdates updates(sharded, {.local_steps = 4, .compression = Compression::kBFloat16});
  for (int number = 0; number < 5; ++number) step(net, *optimizer, updates, number);
  const OptimizerState right = updates.state();
  std::vector<Tensor> before;
  for (const Tensor& parameter : trained(net)) before.push_back(parameter.detach().clone());
  const auto own = [](OptimizerState & state) -> auto& {
    return state.communication.of_ranks.front().second;
  };
  const std::vector<Change> changes = {
      [](OptimizerState& state) { state = {}; },
      [](OptimizerState& state) { state.communication.method += "!"; },
      [](OptimizerState& state) { ++state.communication.ranks; },
      [](OptimizerState& state) { ++state.communication.of_ranks.front().first; },
      [](OptimizerState& state) { state.communication.of_ranks.clear(); },
      [](OptimizerState& state) { state.communication.numbers.front().second = "one"; },
      [&](OptimizerState& state) { own(state).pop_back(); },
      [&](OptimizerState& state) { own(state).emplace_back("another", OptimizerState::Values{}); },
      [&](OptimizerState& state) { own(state).front().second.pop_back(); },
      [&](OptimizerState& state) { own(state).front().second.emplace_back("another", 1); },
      [&](OptimizerState& state) { own(state).front().second.front().second = torch::zeros({3}); },
      [&](OptimizerState& state) { own(state).front().second.front().second = 3; },
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    OptimizerState wrong = right;
    if (rank() == size() - 1) changes[i](wrong);
    EXPECT_THROW(updates.load_state(wrong), ConfigError) << i;
  }
  if (size() > 1) {
    OptimizerState of_another_step = right, of_another_run = right;
    if (rank() == 0) {
      of_another_step.communication.numbers.front().second = std::int64_t{2};
      for (auto& [key, value] : own(of_another_run).front().second) {
        if (key == "start") value = value.toTensor() + 1;
      }
    }
    EXPECT_THROW(updates.load_state(of_another_step), ConfigError);
    EXPECT_THROW(updates.load_state(of_another_run), ConfigError);
  }
  EXPECT_EQ(updates.local_step(), 5);
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(trained(net)[i], before[i])) << i;
  updates.load_state(right);
}

// What has been applied in all rounds, and what ranks hold back, are together what all ranks had; of gTop-k
// as it was published they are not.
TEST(LocalUpdates, NothingIsLostOfWhatIsCompressed) {
  for (const Compression compression :
       {Compression::kBFloat16, Compression::kTopK, Compression::kGTopK, Compression::kGTopKTree}) {
    torch::nn::Linear layer(torch::nn::LinearOptions(256, 4 * size()).bias(false));
    Shard sharded = shard(*layer, group());
    LocalUpdatesOptions options{
        .local_steps = 1, .outer_lr = 1, .outer_momentum = 0, .compression = compression};
    if (compression != Compression::kBFloat16) options.compression_options.density = 0.02;
    LocalUpdates updates(sharded, options);
    const torch::NoGradGuard no_grad;
    Tensor weight = layer->weight;
    Tensor had = torch::zeros({weight.numel()}, torch::kDouble), applied = had.clone();
    torch::manual_seed(11);
    const Tensor scale =
        torch::randn_like(weight).mul(2).exp2();  // ranks' largest elements are often the same
    for (int round = 0; round < 6; ++round) {
      const Tensor start = weight.clone();
      torch::manual_seed(static_cast<std::uint64_t>(100 * round + rank()));
      weight.add_(torch::randn_like(weight) * scale, 0.1);
      had += (start - weight).reshape({-1}).to(torch::kDouble);
      updates.step();
      applied += (start - weight).reshape({-1}).to(torch::kDouble);
    }
    const OptimizerState state = updates.state();
    for (const auto& [name, values] : state.communication.of_ranks.front().second) {
      for (const auto& [key, value] : values) {
        if (key == "residual") applied += value.toTensor().to(torch::kDouble);
        if (key != "residual_of_sum") continue;  // of this rank's slice of the sum
        const std::int64_t slice = weight.numel() / size();
        applied.narrow(0, rank() * slice, slice) += value.toTensor().to(torch::kDouble);
      }
    }
    all_reduce({had, applied}, group());
    const double lost = (had - applied).abs().max().item<double>() / had.abs().max().item<double>();
    const bool loses = compression == Compression::kGTopKTree && size() > 2;
    EXPECT_EQ(lost < 1e-5, !loses) << name_of(compression) << " has lost " << lost;
  }
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

// A program that loads a module begins a round with that, and the outer optimizer's momentum stays.
TEST(LocalUpdates, WhatIsLoadedBeginsARound) {
  Net net(7), other(21);
  Shard sharded = shard(*net, group());
  const Optimizer optimizer = kInner[0].make(sharded.parameters());
  LocalUpdates updates(sharded, {.local_steps = 3, .parts = 2, .overlap_steps = 1});
  for (int number = 0; number < 4; ++number) step(net, *optimizer, updates, number);
  Shard source = shard(*other, group());
  sharded.load_state_dict({source.full_state_dict()});
  EXPECT_EQ(updates.local_step(), 0);
  updates.finish();  // nothing has been stepped
  expect_same(*net, *other, "loaded");
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
    refused({.compression = rank() == 0 ? Compression::kNone : Compression::kBFloat16});
  }
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
