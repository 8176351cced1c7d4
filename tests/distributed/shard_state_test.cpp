// States of modules and optimizers: saved whole and in parts, loaded at every stage and by one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "distributed/through_file.h"
#include "reef/budget.h"
#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "reef/shard.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

const std::vector<Case> kSaved = {
    kCases[0],
    kCases[1],
    {"reef int8",
     [](std::vector<Tensor> all) {
       return std::make_shared<optim::AdamW>(
           all, optim::AdamWOptions(1e-2).state(optim::StateFormat::kInt8).min_quantized_numel(600));
     }},
    {"reef int4", [](std::vector<Tensor> all) {
       return std::make_shared<optim::RMSprop>(all, optim::RMSpropOptions(1e-3)
                                                        .momentum(0.9)
                                                        .state(optim::StateFormat::kInt4Compensated)
                                                        .min_quantized_numel(600));
     }}};

void step_together(Net net, const Optimizer& optimizer, int step) {
  optimizer->zero_grad();
  net->forward(batch(Ranks::kAlike, rank(), step)).backward();
  optimizer->step();
}

/// The parameters that Net has and a gradient reaches, for an optimizer of one process.
std::vector<Tensor> trained(const Net& net) {
  std::vector<Tensor> all;
  for (const Tensor& parameter : parameters_of(net)) {
    if (parameter.requires_grad()) all.push_back(parameter);
  }
  return all;
}

/// Every rank's bytes, on every rank.
std::vector<std::string> of_all_ranks(const std::string& own) {
  std::vector<std::string> all;
  for (int of = 0; of < size(); ++of) {
    std::string& bytes = all.emplace_back(own);
    const Tensor length = torch::tensor(static_cast<std::int64_t>(bytes.size()));
    broadcast({length}, group(), of);
    bytes.resize(static_cast<std::size_t>(length.item<std::int64_t>()));
    broadcast({torch::from_blob(bytes.data(), {length.item<std::int64_t>()}, torch::kByte)}, group(), of);
  }
  return all;
}
/// Every rank's, on every rank, as if read from files.
std::vector<StateDict> of_all_ranks(const StateDict& own) {
  const std::vector<char> bytes = torch::pickle_save(own);
  std::vector<StateDict> all;
  for (const std::string& file : of_all_ranks(std::string(bytes.begin(), bytes.end()))) {
    all.push_back(c10::impl::toTypedDict<std::string, Tensor>(
        torch::pickle_load(std::vector<char>(file.begin(), file.end())).toGenericDict()));
  }
  return all;
}
std::vector<OptimizerState> of_all_ranks(const OptimizerState& own) {
  std::stringstream saved;
  torch::save(own, saved);
  std::vector<OptimizerState> all;
  for (const std::string& file : of_all_ranks(saved.str())) {
    std::stringstream read(file);
    torch::load(all.emplace_back(), read);
  }
  return all;
}

enum class Given { kWhole, kOnRank0, kParts };

// Two steps, saved; in another module, at another stage with other buckets, two more: what one process gets
// that takes four. And that process can load the half, too.
TEST(ShardState, GoesOnAtAnyStageAndInOneProcess) {
  for (const Case& tested : kSaved) {
    Net expected(7);
    const Optimizer reference = tested.make(trained(expected));
    for (int step = 0; step < 2; ++step) step_alone(expected, reference, Ranks::kAlike, step);
    Net halfway(7);
    const Optimizer half = tested.make(trained(halfway));
    for (int step = 0; step < 2; ++step) step_alone(halfway, half, Ranks::kAlike, step);
    for (int step = 2; step < 4; ++step) step_alone(expected, reference, Ranks::kAlike, step);

    std::vector<std::pair<Stage, int>> savers;  // with their shard_degree
    for (const Stage from : kStages) {
      savers.emplace_back(from, 0);
      if (from != Stage::kReplicate && size() % 2 == 0 && &tested == &kSaved[2])
        savers.emplace_back(from, size() / 2);
    }
    for (const auto& [from, degree] : savers) {
      Net net(7);
      Shard sharded = shard(*net, group(), {.stage = from, .bucket_bytes = 5000, .shard_degree = degree});
      const Optimizer optimizer = tested.make(sharded.parameters());
      for (int step = 0; step < 2; ++step) step_together(net, optimizer, step);

      const StateDict whole = through_file(sharded.full_state_dict());
      const OptimizerState of_optimizer = through_file(sharded.full_optimizer_state(*optimizer));
      const std::vector<StateDict> parts = of_all_ranks(sharded.sharded_state_dict());
      const std::vector<OptimizerState> optimizer_parts =
          of_all_ranks(sharded.sharded_optimizer_state(*optimizer));

      // One process, plain torch: module by name, optimizer by its own load().
      {
        Net alone(8);
        torch::NoGradGuard no_grad;
        for (auto& item : alone->named_parameters()) item.value().copy_(whole.at(item.key()));
        for (auto& item : alone->named_buffers()) item.value().copy_(whole.at(item.key()));
        const Optimizer plain = tested.make(trained(alone));
        std::stringstream file;
        torch::save(of_optimizer, file);
        torch::load(*plain, file);
        const torch::AutoGradMode grad(true);
        for (int step = 2; step < 4; ++step) step_alone(alone, plain, Ranks::kAlike, step);
        expect_same(*alone, *expected, std::string("one process, ") + where(tested, from, 0));
      }
      for (const Given how : {Given::kWhole, Given::kOnRank0, Given::kParts}) {
        for (const Stage to : kStages) {
          // Each way to each stage, and each stage to each.
          if ((static_cast<int>(from) + static_cast<int>(to)) % 3 != static_cast<int>(how)) continue;
          const std::string text = where(tested, to, 900) + " from stage " +
                                   std::to_string(static_cast<int>(from)) + " as " +
                                   std::to_string(static_cast<int>(how));
          Net other(9);
          Shard resumed =
              shard(*other, group(),
                    {.stage = to, .bucket_bytes = 900, .shard_degree = to == Stage::kReplicate ? 0 : degree});
          const Optimizer own = tested.make(resumed.parameters());
          if (how == Given::kWhole) {
            resumed.load_state_dict({whole});
            resumed.load_optimizer_state(*own, {of_optimizer});
          } else if (how == Given::kParts) {
            resumed.load_state_dict(parts);
            resumed.load_optimizer_state(*own, optimizer_parts);
          } else {
            resumed.load_state_dict(rank() == 0 ? std::vector<StateDict>{whole} : std::vector<StateDict>{});
            resumed.load_optimizer_state(*own, {rank() == 0 ? of_optimizer : OptimizerState{}});
          }
          EXPECT_TRUE(torch::equal(other->frozen, net->frozen) && torch::equal(other->scale, net->scale));
          for (int step = 2; step < 4; ++step) step_together(other, own, step);
          resumed.gather();
          expect_same(*other, *expected, text);
        }
      }
    }
    // torch's own file, which names nothing.
    std::stringstream file;
    torch::save(*half, file);
    OptimizerState plain;
    torch::load(plain, file);
    Net other(9);
    Shard resumed = shard(*other, group(), {.stage = Stage::kParameters, .bucket_bytes = 900});
    const Optimizer own = tested.make(resumed.parameters());
    StateDict dict;
    for (auto& item : halfway->named_parameters()) dict.insert(item.key(), item.value().detach());
    for (auto& item : halfway->named_buffers()) dict.insert(item.key(), item.value());
    resumed.load_state_dict({dict});
    resumed.load_optimizer_state(*own, {plain});
    for (int step = 2; step < 4; ++step) step_together(other, own, step);
    resumed.gather();
    expect_same(*other, *expected, std::string("a file of one process, ") + tested.name);
  }
}

TEST(ShardState, HasEveryNameAndOnlyWhereAskedFor) {
  for (const Stage stage : kStages) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    const StateDict all = sharded.full_state_dict();
    const StateDict first = sharded.full_state_dict(/*rank0_only=*/true);
    EXPECT_EQ(first.size(), rank() == 0 ? all.size() : 0);
    sharded.gather();
    std::size_t names = 0;
    for (const auto& items : {net->named_parameters(), net->named_buffers()}) {
      for (const auto& item : items) {
        ++names;
        EXPECT_TRUE(torch::equal(all.at(item.key()), item.value())) << item.key();
        EXPECT_FALSE(all.at(item.key()).is_alias_of(item.value())) << item.key();
      }
    }
    EXPECT_EQ(all.size(), names);
    torch::optim::SGD none(sharded.parameters(), 0.1);
    EXPECT_EQ(sharded.full_optimizer_state(none, true).groups.size(), rank() == 0 ? 1 : 0);
  }
}

TEST(ShardState, WhatIsWrongOnOneRankIsHeardOfOnAllBeforeAnythingChanges) {
  for (const Stage stage : kStages) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const StateDict good = sharded.full_state_dict();
    const auto expect_error = [&](const auto& load, const std::string& text) {
      try {
        load();
        ADD_FAILURE() << "no error: " << text;
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
        const std::string said_by = "rank " + std::to_string(size() - 1) + ": ";
        EXPECT_EQ(std::string(error.what()).rfind(said_by, 0) == 0, rank() != size() - 1) << error.what();
      }
    };
    const auto expect_refused = [&](const auto& change, const std::string& text) {
      StateDict bad;
      for (const auto& entry : good) bad.insert(entry.key(), torch::zeros_like(entry.value()));
      if (rank() == size() - 1) change(bad);
      expect_error([&] { sharded.load_state_dict({bad}); }, text);
    };
    expect_refused([](StateDict& bad) { EXPECT_EQ(bad.erase("up.weight"), 1); }, "is missing");
    expect_refused([](StateDict& bad) { EXPECT_EQ(bad.erase("scale"), 1); }, "scale is missing");
    expect_refused([](StateDict& bad) { EXPECT_EQ(bad.erase("frozen"), 1); }, "frozen is missing");
    expect_refused([](StateDict& bad) { bad.insert("more", torch::zeros(3)); },
                   "has more, which the module has not");
    expect_refused(
        [](StateDict& bad) {
          bad.insert_or_assign("even", torch::zeros({24, 4}));
        },
        "even has the shape [24, 4] in the state that is loaded and [24, 3] here");
    for (const auto& entry : sharded.full_state_dict())
      EXPECT_TRUE(torch::equal(entry.value(), good.at(entry.key()))) << entry.key();

    OptimizerState two = sharded.full_optimizer_state(optimizer);
    if (rank() == size() - 1) two.groups.push_back(two.groups.front());
    expect_error([&] { sharded.load_optimizer_state(optimizer, {two}); },
                 "the optimizer has 1 parameter groups, and 2 in the state that is loaded");
    OptimizerState fewer = sharded.full_optimizer_state(optimizer);
    if (rank() == size() - 1) {
      fewer.groups[0].ids.pop_back();
      fewer.groups[0].names.clear();
    }
    expect_error([&] { sharded.load_optimizer_state(optimizer, {fewer}); }, "which does not name them");
  }
  EXPECT_THROW(shard(*Net(7), group()).load_state_dict({}), ConfigError);
  Net net(7);
  Shard sharded = shard(*net, group(), {.stage = Stage::kOptimizer});
  torch::optim::SGD foreign(net->parameters(), 0.1);
  EXPECT_THROW(sharded.sharded_optimizer_state(foreign), ConfigError);
}

// Of a model that is smaller than the ranks' shares, all but one keep nothing.
TEST(ShardState, RanksThatKeepNothingSaveThatAndLoadIt) {
  for (const Stage stage : kStages) {
    const auto step = [](torch::nn::Linear layer, torch::optim::Optimizer& optimizer) {
      optimizer.zero_grad();
      layer->forward(torch::ones({2, 8})).pow(2).sum().backward();
      optimizer.step();
    };
    torch::manual_seed(5);
    torch::nn::Linear layer(8, 4), other(8, 4);
    Shard first = shard(*layer, group(), {.stage = stage});
    Shard second = shard(*other, group(), {.stage = stage});
    torch::optim::AdamW of_first(first.parameters()), of_second(second.parameters());
    step(layer, of_first);
    second.load_state_dict(of_all_ranks(first.sharded_state_dict()));
    second.load_optimizer_state(of_second, of_all_ranks(first.sharded_optimizer_state(of_first)));
    step(layer, of_first);
    step(other, of_second);
    first.gather();
    second.gather();
    EXPECT_TRUE(torch::equal(layer->weight, other->weight)) << static_cast<int>(stage);
  }
}

// LibTorch's load() replaces a parameter's memory, where Python's copies, and autograd forgets its hooks.
TEST(ShardState, AModuleThatIsLoadedAsAFileIsFoundOut) {
  for (const Stage stage : kStages) {
    Net saved(8), net(7);
    std::stringstream file;
    torch::save(saved, file);
    Shard sharded = shard(*net, group(), {.stage = stage});
    sharded.gather();
    torch::load(net, file);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { sharded.gather(); }, [&] { sharded.full_state_dict(); },
             [&] { sharded.sharded_state_dict(); }, [&] { sharded.load_state_dict({}); }}) {
      try {
        call();
        ADD_FAILURE() << "no error at stage " << static_cast<int>(stage);
      } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("has been given other memory"), std::string::npos)
            << error.what();
      }
    }
  }
}

TEST(ShardState, IsSavedAndLoadedInsideABudget) {
  const auto run = [](Stage stage, std::uint64_t budget_bytes, std::uint64_t& peak,
                      std::uint64_t& evictions) {
    std::optional<Budget> budget(std::in_place, budget_bytes, std::vector<const torch::nn::Module*>{});
    const auto before = budget->use().live_bytes;
    torch::manual_seed(3);
    torch::nn::Sequential net;
    for (int i = 0; i < 16; ++i) net->push_back(torch::nn::Linear(256, 256));
    Shard sharded =
        shard(*net, group(),
              {.stage = stage, .bucket_bytes = 270000, .resident_bytes = resident_within(budget_bytes)});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto train = [&](int step) {
      torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank()));
      optimizer.zero_grad();
      net->forward(torch::randn({64, 256})).pow(2).mean().backward();
      optimizer.step();
    };
    train(0);
    const StateDict saved = sharded.full_state_dict();  // stays: nothing that is recorded made it
    train(1);
    sharded.load_state_dict({saved});
    train(2);
    peak = budget->use().peak_bytes - before;
    evictions = budget->use().evictions;
    budget.reset();
    std::vector<Tensor> found;
    for (const auto& entry : saved) found.push_back(entry.value().clone());
    for (const Tensor& part : sharded.parameters()) found.push_back(part.detach().clone());
    return found;
  };
  for (const Stage stage : kStages) {
    using namespace std::placeholders;
    expect_same_inside_a_budget(std::bind(run, stage, _1, _2, _3), 80,
                                "stage " + std::to_string(static_cast<int>(stage)));
  }
}

}  // namespace
}  // namespace reef::shard_tests
