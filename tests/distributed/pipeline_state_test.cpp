// Trained as several ranks by tests/support/ranks.py.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "pipelines.h"
#include "reef/pipeline.h"
#include "reef/point_to_point.h"

namespace reef {
namespace {

using namespace pipeline_tests;

/// Eight modules: with running statistics, without parameters, and frozen.
torch::nn::Sequential net(std::uint64_t seed = 7) {
  torch::manual_seed(seed);
  torch::nn::Sequential modules;
  modules->push_back(torch::nn::Linear(4, 6));
  modules->push_back(torch::nn::Tanh());
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::BatchNorm1d(6));
  modules->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::Linear(6, 6));
  modules->push_back(torch::nn::Linear(6, 3));
  for (Tensor& parameter : modules[5]->parameters()) parameter.set_requires_grad(false);
  return modules;
}
Tensor batch_of(std::int64_t step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + step));
  return torch::randn({8, 4});
}

/// How a pipeline is cut, and what its ranks divide.
struct Shape {
  std::string name;
  PipelineOptions options;
};
std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const auto ranks = static_cast<std::uint32_t>(size());
  for (std::uint32_t replicas = 1; replicas <= ranks; ++replicas) {
    if (ranks % replicas != 0) continue;
    for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kParameters}) {
      for (const char* schedule : {"1f1b", "zbv", "chimera"}) {
        if (ranks / replicas % 2 == 1 && std::string(schedule) == "chimera") continue;
        if (stage == Stage::kParameters && std::string(schedule) == "zbv") continue;
        Shape& shape = all.emplace_back();
        shape.name = " " + std::string(schedule) + " x " + std::to_string(replicas) + ", stage " +
                     std::to_string(static_cast<int>(stage));
        shape.options = {.micro_batches = 4, .schedule = schedule, .replicas = replicas};
        shape.options.shard.stage = stage;
        shape.options.shard.bucket_bytes = 200;
        if (stage == Stage::kParameters) shape.options.shard.resident_bytes = 0;
      }
    }
  }
  return all;
}

/// A pipeline with the optimizer that steps this rank's parameters.
struct Trained {
  Trained(const Shape& shape, std::uint64_t seed)
      : modules(net(seed)), pipeline(modules, world(), shape.options) {
    // Two groups, of which some ranks have none in one: weights decay, and what has one dimension does not.
    std::vector<std::vector<Tensor>> groups(2);
    for (const auto& [name, parameter] : pipeline.named_parameters()) {
      if (parameter.requires_grad())
        groups[name.find("weight") == std::string::npos ? 1 : 0].push_back(parameter);
    }
    auto plain = std::make_unique<torch::optim::AdamWOptions>(0.05);
    plain->weight_decay(0);
    std::vector<torch::optim::OptimizerParamGroup> given;
    given.emplace_back(groups[0], std::make_unique<torch::optim::AdamWOptions>(0.05));
    given.emplace_back(groups[1], std::move(plain));
    optimizer = std::make_unique<torch::optim::AdamW>(given, torch::optim::AdamWOptions(0.05));
  }
  Tensor step(std::int64_t number) {
    const Tensor loss = pipeline.step(batch_of(number), loss_of);
    optimizer->step();
    optimizer->zero_grad();
    return loss;
  }

  torch::nn::Sequential modules;
  Pipeline pipeline;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

std::vector<std::string> keys(const StateDict& dict) {
  std::vector<std::string> all;
  for (const auto& entry : dict) all.push_back(entry.key());
  return all;
}
void expect_same(const StateDict& got, const StateDict& expected, const std::string& where) {
  ASSERT_EQ(keys(got), keys(expected)) << where;
  for (const auto& entry : expected)
    EXPECT_TRUE(same(got.at(entry.key()), entry.value())) << entry.key() << where;
}
std::string bytes_of(const OptimizerState& state) {
  torch::serialize::OutputArchive archive;
  archive << state;
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}
void expect_same(const OptimizerState& got, const OptimizerState& expected, const std::string& where) {
  ASSERT_EQ(got.groups.size(), expected.groups.size()) << where;
  for (std::size_t g = 0; g < got.groups.size(); ++g)
    EXPECT_EQ(got.groups[g].names, expected.groups[g].names) << where;
  EXPECT_EQ(bytes_of(got), bytes_of(expected)) << where;
}

/// Every rank gives what it has to every rank.
std::vector<StateDict> of_all_ranks(const StateDict& own) {
  std::vector<StateDict> all(static_cast<std::size_t>(size()));
  for (int from = 0; from < size(); ++from) {
    StateDict& dict = all[static_cast<std::size_t>(from)];
    if (from == rank()) {
      for (const auto& entry : own) dict.insert(entry.key(), entry.value().clone());
      const std::vector<char> bytes = torch::pickle_save(own);
      const Tensor message = torch::from_blob(const_cast<char*>(bytes.data()),
                                              {static_cast<std::int64_t>(bytes.size())}, at::kChar);
      for (int to = 0; to < size(); ++to) {
        if (to != from) reef::send(message, to, world());
      }
    } else {
      const Tensor message = reef::receive(from, world());
      const auto* const begin = static_cast<const char*>(message.const_data_ptr());
      const c10::IValue value = torch::pickle_load({begin, begin + message.numel()});
      for (const auto& entry : value.toGenericDict())
        dict.insert(entry.key().toStringRef(), entry.value().toTensor());
    }
  }
  return all;
}

TEST(PipelineState, AnyShapeLoadsWhatAnyOtherHasSaved) {
  const std::vector<Shape> all = shapes();
  StateDict first_model;
  std::optional<OptimizerState> first_optimizer;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Shape& from = all[i];
    const Shape& to = all[(i + 1) % all.size()];
    const std::string where = from.name + " to" + to.name;
    Trained saved(from, 7);
    for (std::int64_t step = 0; step < 2; ++step) saved.step(step);
    const StateDict model = saved.pipeline.full_state_dict();
    const OptimizerState optimizer = saved.pipeline.full_optimizer_state(*saved.optimizer);
    EXPECT_EQ(saved.pipeline.full_state_dict(/*rank0_only=*/true).empty(), rank() != 0) << where;
    // In another pipeline, which has begun otherwise; by whole states, or by what ranks keep.
    for (const bool sharded : {false, true}) {
      Trained loaded(to, 11);
      loaded.step(5);
      if (sharded) {
        loaded.pipeline.load_state_dict(of_all_ranks(saved.pipeline.sharded_state_dict()));
      } else {
        loaded.pipeline.load_state_dict({rank() == 0 ? model : StateDict()});
      }
      loaded.pipeline.load_optimizer_state(*loaded.optimizer, {optimizer});
      if (from.options.replicas == 1) {  // running statistics are of each replica by itself
        expect_same(loaded.pipeline.full_state_dict(), model, where);
      }
      expect_same(loaded.pipeline.full_optimizer_state(*loaded.optimizer), optimizer, where);
    }
    // All shapes without replicas have taken the same steps; chimera adds up in another order.
    if (from.options.replicas > 1 || from.options.schedule == "chimera") continue;
    if (!first_optimizer) {
      first_model = model;
      first_optimizer = optimizer;
    }
    expect_same(model, first_model, from.name);
    expect_same(optimizer, *first_optimizer, from.name);
  }
}

TEST(PipelineState, StatesAreThoseOfOneProcess) {
  // One process, with an optimizer over all parameters.
  torch::nn::Sequential one = net();
  std::vector<Tensor> trained;
  for (Tensor& parameter : one->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  torch::optim::AdamW whole(trained, torch::optim::AdamWOptions(0.05));
  Pipeline pipeline(one, world(), {.micro_batches = 2});
  torch::nn::Sequential copy = net();
  std::vector<Tensor> parts;
  for (const Tensor& parameter : pipeline.parameters()) {
    if (parameter.requires_grad()) parts.push_back(parameter);
  }
  torch::optim::AdamW own(parts, torch::optim::AdamWOptions(0.05));
  for (std::int64_t step = 0; step < 2; ++step) {
    pipeline.step(batch_of(step), loss_of);
    own.step();
    own.zero_grad();
  }
  const StateDict model = pipeline.full_state_dict();
  std::vector<std::string> names;
  for (const auto& each : copy->named_parameters()) names.push_back(each.key());
  for (const auto& each : copy->named_buffers()) names.push_back(each.key());
  EXPECT_EQ(keys(model).size(), names.size());
  const torch::NoGradGuard no_grad;
  for (auto& each : copy->named_parameters()) each.value().copy_(model.at(each.key()));
  // torch's own file of it, without names, is loaded by place.
  const OptimizerState state = pipeline.full_optimizer_state(own);
  std::vector<Tensor> copied;
  for (Tensor& parameter : copy->parameters()) {
    if (parameter.requires_grad()) copied.push_back(parameter);
  }
  torch::optim::AdamW of_copy(copied, torch::optim::AdamWOptions(0.05));
  load_optimizer_state(of_copy, state);
  OptimizerState unnamed = optimizer_state(of_copy);
  torch::nn::Sequential again = net(9);
  Pipeline loaded(again, world(), {.micro_batches = 2, .schedule = "zbv"});
  std::vector<Tensor> loaded_parts;
  for (const Tensor& parameter : loaded.parameters()) {
    if (parameter.requires_grad()) loaded_parts.push_back(parameter);
  }
  torch::optim::AdamW other(loaded_parts, torch::optim::AdamWOptions(0.05));
  loaded.load_optimizer_state(other, {unnamed});
  expect_same(loaded.full_optimizer_state(other), state, "");
}

TEST(PipelineState, WhatIsWrongIsRefusedOnAllAndChangesNothing) {
  Trained run(shapes().back(), 7);
  run.step(0);
  const StateDict before = run.pipeline.full_state_dict();
  const OptimizerState of_optimizer = run.pipeline.full_optimizer_state(*run.optimizer);
  const auto refused = [&](const std::function<void()>& call) {
    const std::string told = config_error(call);
    expect_same(run.pipeline.full_state_dict(), before, told);
    expect_same(run.pipeline.full_optimizer_state(*run.optimizer), of_optimizer, told);
    return told;
  };
  const auto changed = [&](const std::function<void(StateDict&)>& change) {
    StateDict dict;
    for (const auto& entry : before) dict.insert(entry.key(), entry.value() + 1);
    change(dict);
    return dict;
  };
  const auto load = [&](const StateDict& dict) {
    return refused([&] { run.pipeline.load_state_dict({dict}); });
  };
  expect_words(load(changed([](StateDict& dict) { dict.insert("9.weight", at::zeros({1})); })),
               {"9.weight", "has not"});
  expect_words(load(changed([](StateDict& dict) { EXPECT_EQ(dict.erase("0.weight"), 1U); })),
               {"0.weight", "missing"});
  expect_words(load(changed([](StateDict& dict) { EXPECT_EQ(dict.erase("3.running_mean"), 1U); })),
               {"3.running_mean", "missing"});
  expect_words(load(changed([](StateDict& dict) { dict.insert_or_assign("7.bias", at::zeros({5})); })),
               {"7.bias", "shape"});
  expect_words(load(StateDict()), {"no rank has given"});
  const auto load_other = [&](const OptimizerState& state) {
    return refused([&] { run.pipeline.load_optimizer_state(*run.optimizer, {state}); });
  };
  OptimizerState fewer = of_optimizer;
  fewer.groups.pop_back();
  expect_words(load_other(fewer), {"groups"});
  OptimizerState renamed = of_optimizer;
  renamed.groups[0].names[0] = "11.weight";
  expect_words(load_other(renamed), {"0.weight", "group 0"});
  torch::optim::SGD stranger({at::zeros({2})}, torch::optim::SGDOptions(0.1));
  expect_words(config_error([&] { run.pipeline.full_optimizer_state(stranger); }), {"none of parameters()"});
  if (size() > 1) {
    torch::optim::SGD sgd(run.pipeline.parameters(), torch::optim::SGDOptions(0.1));
    expect_words(config_error([&] {
                   if (rank() == 0) {
                     run.pipeline.full_optimizer_state(sgd);
                   } else {
                     run.pipeline.full_optimizer_state(*run.optimizer);
                   }
                 }),
                 {"SGD", "AdamW"});
  }
}

TEST(PipelineState, GradientBytesDoNotDependOnTheNumberOfMicroBatches) {
  if (size() == 1) GTEST_SKIP() << "one rank sends nothing";
  for (const Stage stage : {Stage::kReplicate, Stage::kOptimizer, Stage::kGradients}) {
    std::optional<std::int64_t> before;
    for (const std::uint32_t micro_batches : {1U, 2U, 8U}) {
      torch::nn::Sequential modules = net();
      PipelineOptions options{.micro_batches = micro_batches, .replicas = static_cast<std::uint32_t>(size())};
      options.shard.stage = stage;
      Pipeline pipeline(modules, world(), options);
      const std::int64_t begun = pipeline.sent_bytes();
      pipeline.step(torch::ones({16, 4}), loss_of);
      const std::int64_t sent = pipeline.sent_bytes() - begun;
      EXPECT_GT(sent, 0);
      EXPECT_EQ(sent, before.value_or(sent)) << micro_batches;
      before = sent;
    }
  }
}

}  // namespace
}  // namespace reef
