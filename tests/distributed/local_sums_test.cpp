// Steps with a rank's own gradients, and the mean of parameters: against one process that does all ranks'
// steps.
#include <string>
#include <utility>
#include <vector>

#include "reef/delayed_update.h"
#include "reef/error.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

ShardOptions options_of(int row) {
  ShardOptions options{.bucket_bytes = 5000, .reduction = row == 1 ? Reduction::kSum : Reduction::kMean};
  options.offload = row == 2;
  options.buffers = Buffers::kBroadcast;
  if (row == 3) options.compression = Compression::kBFloat16;
  return options;
}
constexpr int kRows = 4;

/// Of what all ranks have, in their order.
Tensor mean_of(const std::vector<Tensor>& values) {
  Tensor sum = values.front().clone();
  for (std::size_t of = 1; of < values.size(); ++of) sum += values[of];
  return sum.div(size());
}

/// All ranks' nets in one process, which take their steps one after another.
struct Alone {
  explicit Alone(const Case& tested) {
    for (int of = 0; of < size(); ++of) {
      nets.emplace_back(7);
      optimizers.push_back(tested.make(parameters_of(nets.back())));
    }
  }
  void step(int of, int number) {
    const auto at = static_cast<std::size_t>(of);
    optimizers[at]->zero_grad();
    nets[at]->forward(batch(Ranks::kDiffer, of, number)).backward();
    optimizers[at]->step();
  }
  void average() {
    const torch::NoGradGuard no_grad;
    const auto first = parameters_of(nets.front());
    for (std::size_t i = 0; i < first.size(); ++i) {
      if (!first[i].requires_grad()) continue;
      std::vector<Tensor> values;
      for (const Net& net : nets) values.push_back(parameters_of(net)[i]);
      const Tensor mean = mean_of(values);
      for (Tensor& value : values) value.copy_(mean);
    }
  }
  std::vector<Net> nets;
  std::vector<Optimizer> optimizers;
};

// Rounds of local steps, as many as the rank's number and one more, of which nobody else hears; then the
// mean.
TEST(LocalSums, RoundsAreThoseOfOneProcess) {
  for (const Case& tested : kCases) {
    for (int row = 0; row < kRows; ++row) {
      const std::string text = std::string(tested.name) + ", row " + std::to_string(row);
      Alone alone(tested);
      Net net(7);
      Shard sharded = shard(*net, group(), options_of(row));
      const Optimizer optimizer = tested.make(sharded.parameters());
      const std::int64_t before = sharded.sent_bytes();
      std::int64_t averages = 0;
      for (int round = 0; round < 3; ++round) {
        {
          const Shard::LocalSums local(sharded);
          for (int step = 0; step <= rank(); ++step) {
            optimizer->zero_grad();
            net->forward(batch(Ranks::kDiffer, rank(), 10 * round + step)).backward();
            optimizer->step();
          }
        }
        for (int of = 0; of < size(); ++of) {
          for (int step = 0; step <= of; ++step) alone.step(of, 10 * round + step);
        }
        EXPECT_EQ(sharded.sent_bytes(), before + averages) << text;
        expect_same(*net, *alone.nets[static_cast<std::size_t>(rank())], text + ", before the mean");
        const std::int64_t sent = sharded.sent_bytes();
        sharded.average_parameters();
        averages += sharded.sent_bytes() - sent;
        alone.average();
        expect_same(*net, *alone.nets.front(), text + ", after it");
      }
      if (row < 3) continue;
      EXPECT_TRUE(sharded.communication().of_ranks.front().second.empty()) << text;
    }
  }
}

// Sums of no_sync() are part of the next local pass, and what has been reduced before is not lost; a pass
// over the ranks comes after local ones as it comes after others.
TEST(LocalSums, PassesOfAllKindsFollowEachOther) {
  for (int row = 0; row < 3; ++row) {
    const std::string text = "row " + std::to_string(row);
    const ShardOptions options = options_of(row);
    Net net(7), own(7), all(7);
    Shard sharded = shard(*net, group(), options);
    const auto expect_gradients = [&](const Net& expected, const std::string& when) {
      const auto theirs = expected->named_parameters();
      for (std::size_t i = 0; i < sharded.names().size(); ++i) {
        const std::string& name = sharded.names()[i];
        const Tensor found = sharded.parameters()[i].grad(), gradient = theirs[name].grad();
        ASSERT_EQ(found.defined(), gradient.defined()) << text << when << name;
        EXPECT_TRUE(!found.defined() || torch::equal(found, gradient)) << text << when << name;
      }
    };
    {
      const Shard::LocalSums local(sharded);
      {
        const Shard::NoSync pause(sharded);
        net->forward(batch(Ranks::kAlike, rank(), 0)).backward();
      }
      net->forward(batch(Ranks::kAlike, rank(), 1)).backward();
    }
    for (int step = 0; step < 2; ++step) own->forward(batch(Ranks::kAlike, rank(), step)).backward();
    expect_gradients(own, ", local ");
    torch::optim::SGD(sharded.parameters(), torch::optim::SGDOptions(0.1)).zero_grad();
    net->forward(batch(Ranks::kAlike, rank(), 2)).backward();
    accumulate(all, Ranks::kAlike, 2, options.reduction);
    expect_gradients(all, ", over the ranks ");
  }
}

struct Fails : torch::autograd::Function<Fails> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "this rank is out of memory");
  }
};

// A local pass that fails is its rank's business: gradients are what they were, and all go on together.
TEST(LocalSums, APassThatFailsIsItsOwnRanks) {
  for (const bool offload : {false, true}) {
    Net net(7), all(7);
    Shard sharded = shard(*net, group(), {.bucket_bytes = 5000, .offload = offload});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
    if (rank() == 0) {
      const Shard::LocalSums local(sharded);
      const Tensor loss =
          net->forward(batch(Ranks::kAlike, 0, 0)) + Fails::apply(net->norm->weight * 1).sum();
      EXPECT_THROW(loss.backward(), c10::OutOfMemoryError);
      for (const Tensor& parameter : sharded.parameters()) EXPECT_FALSE(parameter.grad().defined());
    }
    net->forward(batch(Ranks::kAlike, rank(), 1)).backward();
    optimizer.step();
    sharded.gather();
    torch::optim::SGD plain(parameters_of(all), torch::optim::SGDOptions(0.1));
    accumulate(all, Ranks::kAlike, 1);
    plain.step();
    expect_same(*net, *all, offload ? "offload" : "replicate");
  }
}

// Masters of 16 bits are averaged, and the parameters are those rounded. Bytes are a step's.
TEST(LocalSums, TheMeanIsOfMastersAndSendsAStepsBytes) {
  torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
  Shard sharded = shard(*layer, group(), {.mixed_precision = MixedPrecision{}});
  const auto value = [&](int of) {
    torch::manual_seed(static_cast<std::uint64_t>(50 + of));
    return torch::randn({96 * size(), 512});
  };
  {
    const torch::NoGradGuard no_grad;
    sharded.parameters().front().copy_(value(rank()));
  }
  std::vector<Tensor> values;
  for (int of = 0; of < size(); ++of) values.push_back(value(of));
  const std::int64_t before = sharded.sent_bytes();
  sharded.average_parameters();
  EXPECT_EQ(sharded.sent_bytes() - before, 2 * (size() - 1) * 4 * 96 * 512);
  EXPECT_TRUE(torch::equal(sharded.parameters().front(), mean_of(values)));
  EXPECT_TRUE(torch::equal(layer->weight, mean_of(values).to(at::kBFloat16)));
}

TEST(LocalSums, WhatIsDividedIsRefused) {
  for (const Stage stage : {Stage::kOptimizer, Stage::kGradients, Stage::kParameters}) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage});
    EXPECT_THROW(Shard::LocalSums{sharded}, ConfigError);
    EXPECT_THROW(sharded.average_parameters(), ConfigError);
  }
  Net net(7);
  Shard sharded = shard(*net, group());
  const Shard::LocalSums local(sharded);
  EXPECT_THROW(sharded.refresh(*net), ConfigError);
}

}  // namespace
}  // namespace reef::shard_tests
