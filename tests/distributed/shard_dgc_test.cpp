// compression dgc, whose momentum is remembered beside what is held back: on one rank it is the optimizer's;
// it is saved, loaded by other layouts, and refused where it would be no momentum, or a second one.
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "distributed/through_file.h"
#include "reef/error.h"
#include "reef/local_updates.h"
#include "reef/optimizer_state.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

using Communication = OptimizerState::Communication;

struct Row {
  Stage stage;
  int degree;
  ShardOptions options(std::int64_t bucket_bytes = 5000) const {
    return {.stage = stage,
            .bucket_bytes = bucket_bytes,
            .compression = Compression::kDgc,
            .compression_options = {.density = {{0, 0.2}, {1, 0.03}}, .max_norm = 0.5},
            .shard_degree = degree};
  }
  std::string text() const {
    return "stage " + std::to_string(static_cast<int>(stage)) + " among " + std::to_string(degree) +
           " on rank " + std::to_string(rank());
  }
};

std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Stage stage : kStages) {
    all.push_back({stage, 0});
    if (stage != Stage::kReplicate && size() == 4) all.push_back({stage, 2});
  }
  return all;
}

Optimizer without_momentum(const std::vector<Tensor>& parameters) {
  return std::make_shared<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
}

/// Steps [first, last) of this rank's batches.
void train(Net net, Row row, torch::optim::Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    optimizer.zero_grad();
    net->forward(batch(ranks_at(row.stage), rank(), step)).backward();
    optimizer.step();
  }
}

/// By what is remembered and the parameter: of all ranks together.
std::map<std::string, Tensor> totals_of(const Communication& all, const Net& net) {
  std::map<std::string, Tensor> totals;
  for (const auto& [rank, values] : all.of_ranks) {
    for (const auto& [name, of_name] : values) {
      const std::size_t open = name.find('[');
      const std::string parameter = name.substr(0, open);
      const std::int64_t first = open == std::string::npos ? 0 : std::stoll(name.substr(open + 1));
      for (const auto& [key, value] : of_name) {
        Tensor& total = totals[key + " of " + parameter];
        if (!total.defined()) total = torch::zeros({net->named_parameters()[parameter].numel()});
        total.narrow(0, first, value.toTensor().numel()) += value.toTensor().reshape({-1});
      }
    }
  }
  return totals;
}

// Nothing waits there, so nothing is masked: bit for bit an optimizer with momentum, in whatever steps a
// parameter is used.
TEST(ShardDgc, OnOneRankItIsTheOptimizersMomentum) {
  if (size() > 1) return;
  for (const Row& row : rows()) {
    Net expected(7), net(7);
    const Optimizer with_momentum = kCases[0].make(parameters_of(expected));
    ShardOptions options = row.options();
    options.compression_options = {.momentum = 0.9};
    Shard sharded = shard(*net, group(), options);
    const Optimizer plain = without_momentum(sharded.parameters());
    for (int step = 0; step < kSteps; ++step) {
      step_alone(expected, with_momentum, ranks_at(row.stage), step);
      train(net, row, *plain, step, step + 1);
    }
    sharded.gather();
    expect_same(*net, *expected, row.text());
  }
}

// Whole, or as parts: the same bits as without a break. At another stage, with other buckets, all that is
// held back is there, and so are the momenta.
TEST(ShardDgc, GoesOnFromAState) {
  const std::vector<Row> all = rows();
  for (std::size_t from = 0; from < all.size(); ++from) {
    const Row& row = all[from];
    Net net(7);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = without_momentum(sharded.parameters());
    train(net, row, *optimizer, 0, 2);
    const StateDict module = sharded.full_state_dict();
    const OptimizerState whole = through_file(sharded.full_optimizer_state(*optimizer));
    train(net, row, *optimizer, 2, kSteps);
    sharded.gather();
    for (const Row& to : {row, all[(from + 1) % all.size()]}) {
      const std::string text = row.text() + " to " + to.text();
      const bool is_same = to.stage == row.stage && to.degree == row.degree;
      Net resumed_net(9);
      Shard resumed = shard(*resumed_net, group(), to.options(is_same ? 5000 : 900));
      const Optimizer own = without_momentum(resumed.parameters());
      resumed.load_state_dict({module});
      resumed.load_optimizer_state(*own, {whole});
      const auto expected = totals_of(whole.communication, net);
      const auto found = totals_of(resumed.full_optimizer_state(*own).communication, net);
      EXPECT_EQ(found.size(), expected.size()) << text;
      EXPECT_EQ(expected.contains("momentum_of_rank of down.weight"), true) << text;
      EXPECT_EQ(expected.contains("residual of down.weight"), size() > 1) << text;
      for (const auto& [name, total] : expected) {
        ASSERT_TRUE(found.contains(name)) << text << ", " << name;
        EXPECT_TRUE(torch::allclose(found.at(name), total, 1e-5, 1e-6)) << text << ", " << name;
      }
      if (!is_same) continue;
      train(resumed_net, to, *own, 2, kSteps);
      resumed.gather();
      expect_same(*resumed_net, *net, text);
    }
  }
}

struct Fails : torch::autograd::Function<Fails> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "this rank is out of memory");
  }
};

// A pass that a rank abandons while buckets are on their way leaves every bit of both.
TEST(ShardDgc, WhatIsRememberedOutlivesAnAbandonedPass) {
  if (size() == 1) return;
  for (const Row& row : rows()) {
    Net net(7);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = without_momentum(sharded.parameters());
    train(net, row, *optimizer, 0, 2);
    const auto before = totals_of(sharded.communication(), net);
    EXPECT_FALSE(before.empty()) << row.text();
    optimizer->zero_grad();
    try {
      const Tensor loss = net->forward(batch(ranks_at(row.stage), rank(), 2));
      const Tensor more = rank() == 1 ? Fails::apply(net->norm->weight * 1).sum() : torch::zeros({});
      (loss + more).backward();
      ADD_FAILURE() << "the pass was not abandoned";
    } catch (const std::exception&) {
    }
    const auto after = totals_of(sharded.communication(), net);
    EXPECT_EQ(after.size(), before.size()) << row.text();
    for (const auto& [name, total] : before)
      EXPECT_TRUE(torch::equal(after.at(name), total)) << row.text() << ", " << name;
  }
}

// Between steps the momentum takes the gradients' bytes. With other ranks the residual takes them as well,
// and so does the memory of the residual before it.
TEST(ShardDgc, BytesAreCounted) {
  const Ledger ledger;
  for (const Row& row : rows()) {
    settled_live_bytes();
    const std::int64_t before = ledger.live()[Category::kCommunication];
    torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
    const std::int64_t elements = layer->weight.numel();
    Shard sharded = shard(*layer, group(), row.options(std::int64_t{25} << 20));
    const Optimizer optimizer = without_momentum(sharded.parameters());
    for (int step = 0; step < 2; ++step) {
      optimizer->zero_grad();
      layer->forward(torch::randn({2, 512})).sum().backward();
      optimizer->step();
    }
    sharded.gather();
    settled_live_bytes();
    const std::int64_t exchanged = row.degree != 0 ? elements / row.degree : elements;
    EXPECT_EQ(ledger.live()[Category::kCommunication] - before, (size() > 1 ? 3 : 1) * 4 * exchanged)
        << row.text();
  }
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ShardDgc, IsRefusedWhereItWouldBeNoMomentumOrASecondOne) {
  Net net(7);
  net->to(at::kDouble);
  const std::string of_doubles = refusal([&] { shard(*net, group(), Row{Stage::kReplicate, 0}.options()); });
  EXPECT_NE(of_doubles.find("has gradients of Double, and compression dgc, whose momentum is of float32"),
            std::string::npos)
      << of_doubles;
  const LocalUpdatesOptions options{.local_steps = 2, .outer_momentum = 0, .compression = Compression::kDgc};
  {
    Shard sharded = shard(*net, group());
    const std::string told = refusal([&] { LocalUpdates updates(sharded, options); });
    EXPECT_NE(told.find("is of Double: take another compression"), std::string::npos) << told;
  }
  net->to(at::kFloat);
  Shard sharded = shard(*net, group());
  LocalUpdatesOptions twice = options;
  twice.outer_momentum = 0.9;
  const std::string told = refusal([&] { LocalUpdates updates(sharded, twice); });
  EXPECT_NE(told.find("dgc, which has a momentum of its own, and outer_momentum 0.9: give outer_momentum 0"),
            std::string::npos)
      << told;
  const LocalUpdates updates(sharded, options);
}

}  // namespace
}  // namespace reef::shard_tests
