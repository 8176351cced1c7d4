// Servers and workers over real processes, against one process that does the same. Run as several ranks by
// tests/support/ranks.py.
#include "reef/parameter_server.h"

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "messages.h"
#include "parameter_server_net.h"

namespace reef {
namespace {

using async_net::adam;
using async_net::batch;
using async_net::Make;
using async_net::Net;
using async_net::server_counts;
using async_net::sgd;
using async_net::trained;
using at::Tensor;
using messages::config_error;
using messages::expect_words;
using messages::rank;
using messages::same;
using messages::size;
using messages::world;

void expect_same(const Net& net, const Net& expected) {
  const auto found = trained(net);
  const auto wanted = trained(expected);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same(found[i], wanted[i])) << "parameter " << i;
}

/// One process: the workers' gradients added up in their order, and divided.
Net synchronously(int workers, int steps, const Make& make) {
  Net net;
  const auto optimizer = make(trained(net));
  for (int step = 0; step < steps; ++step) {
    optimizer->zero_grad();
    for (int worker = 0; worker < workers; ++worker) net->loss(batch(worker, step)).backward();
    for (const Tensor& p : trained(net)) p.grad().div_(workers);
    optimizer->step();
  }
  return net;
}

TEST(ParameterServer, WithStalenessZeroIsSynchronousTrainingBitForBit) {
  constexpr int kSteps = 7;
  for (const int servers : server_counts()) {
    for (const auto rule : {AsyncRule::kPlain, AsyncRule::kStalenessAware, AsyncRule::kDelayCompensated}) {
      for (const Make& make : {sgd(), adam()}) {
        const AsyncOptions options{.servers = servers, .rule = rule, .staleness = 0};
        if (rank() < servers) {
          ParameterServer server(world(), options);
          const auto optimizer = make({server.parameter()});
          server.serve(*optimizer);
          EXPECT_TRUE(server.removed().empty());
          EXPECT_EQ(server.log().staleness_histogram(),
                    (std::vector<std::int64_t>{static_cast<std::int64_t>(kSteps) * (size() - servers)}));
          continue;
        }
        Net net;
        AsyncWorker worker(*net, world(), options);
        for (int step = 0; step < kSteps; ++step) {
          worker.pull();
          net->loss(batch(rank() - servers, step)).backward();
          worker.push();
          EXPECT_FALSE(trained(net).front().grad().defined());
        }
        worker.pull();
        EXPECT_EQ(worker.clock(), kSteps);
        expect_same(net, synchronously(size() - servers, kSteps, make));
      }
    }
  }
}

TEST(ParameterServer, ElasticAveragingWithStalenessZeroIsItsFormula) {
  constexpr int kSteps = 5;
  for (const int servers : server_counts()) {
    const int workers = size() - servers;
    const AsyncOptions options{.servers = servers, .rule = AsyncRule::kElastic, .elasticity = 0.3};
    if (rank() < servers) {
      ParameterServer server(world(), options);
      server.serve();
      continue;
    }
    Net net;
    torch::optim::SGD own(trained(net), torch::optim::SGDOptions(0.05));
    AsyncWorker worker(*net, world(), options);
    worker.pull();
    std::vector<Net> all(static_cast<std::size_t>(workers));
    std::vector<Tensor> center;
    for (const Tensor& p : trained(net)) center.push_back(p.detach().clone());
    for (int step = 0; step < kSteps; ++step) {
      own.zero_grad();
      net->loss(batch(rank() - servers, step)).backward();
      own.step();
      worker.push();
      std::vector<Tensor> before;
      for (const Tensor& c : center) before.push_back(c.clone());
      const at::NoGradGuard no_grad;
      for (int each = 0; each < workers; ++each) {
        Net& x = all[static_cast<std::size_t>(each)];
        {
          const at::AutoGradMode grad(true);
          for (const Tensor& p : trained(x)) p.mutable_grad().reset();
          x->loss(batch(each, step)).backward();
        }
        for (std::size_t i = 0; i < before.size(); ++i) {
          const Tensor p = trained(x)[i];
          p.sub_(p.grad() * 0.05F);
          const Tensor pull = (p - before[i]) * 0.3F;
          center[i].add_(pull);
          p.sub_(pull);
        }
      }
      for (std::size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::allclose(trained(net)[i], trained(all[static_cast<std::size_t>(rank() - servers)])[i],
                                 1e-5, 1e-6));
      }
    }
  }
}

// ---- what is refused
// -----------------------------------------------------------------------------------------

/// Makes what the rank is; what is thrown is the same sentence on all ranks.
std::string refused(const AsyncOptions& options, const std::function<void(Net&)>& change,
                    bool wrong_role = false) {
  const auto text = config_error([&] {
    if ((rank() < options.servers) != wrong_role) {
      const ParameterServer server(world(), options);
    } else {
      Net net;
      change(net);
      const AsyncWorker worker(*net, world(), options);
    }
  });
  const Tensor bytes = at::zeros({4096}, at::kByte);
  std::copy_n(text.begin(), std::min<std::size_t>(text.size(), 4096), bytes.mutable_data_ptr<std::uint8_t>());
  const Tensor of_first = bytes.clone();
  broadcast({of_first}, world());
  EXPECT_TRUE(same(bytes, of_first)) << text;
  return text;
}

TEST(ParameterServer, RanksThatDisagreeAreAllToldTheSame) {
  const auto nothing = [](Net&) {};
  const bool last = rank() == size() - 1;
  expect_words(refused({.staleness = last ? 1 : 0}, nothing), {"staleness 0", "staleness 1", "on rank 0"});
  expect_words(refused({.rule = last ? AsyncRule::kElastic : AsyncRule::kPlain}, nothing),
               {"plain", "elastic"});
  expect_words(refused({.servers = size()}, nothing), {"no rank is left to work"});
  expect_words(refused({.servers = 0}, nothing), {"servers is 0"});
  expect_words(refused({.staleness = -3}, nothing), {"staleness is -3"});
  expect_words(refused({}, nothing, /*wrong_role=*/true), {"has made an AsyncWorker", "are the servers"});
  expect_words(refused({},
                       [&](Net& net) {
                         if (last) net->to(at::kDouble);
                       }),
               {"parameter", "Double", "rank " + std::to_string(size() - 1)});
  expect_words(refused({},
                       [](Net& net) {
                         for (auto& p : net->parameters()) p.requires_grad_(false);
                       }),
               {"without a parameter"});
  if (size() > 2) {
    expect_words(refused({},
                         [&](Net& net) {
                           if (last) net->down->bias.set_requires_grad(false);
                         }),
                 {"parameter", "down.bias of Float [5]"});
  }
  EXPECT_NE(config_error([] { const ParameterServer server({}); }).find("init_process_group"),
            std::string::npos);
}

TEST(ParameterServer, WhatAWorkerDoesWrongIsRefusedAndTrainingGoesOn) {
  const AsyncOptions options{.staleness = std::nullopt};
  if (rank() == 0) {
    ParameterServer server(world(), options);
    const auto optimizer = sgd()({server.parameter()});
    EXPECT_NE(config_error([&] { server.serve(); }).find("optimizer"), std::string::npos);
    server.serve(*optimizer);
    EXPECT_EQ(server.log().staleness_histogram().size() > 0, true);
    EXPECT_EQ(server.next(), std::nullopt);
    return;
  }
  Net net;
  AsyncWorker worker(*net, world(), options);
  EXPECT_NE(config_error([&] { worker.push(); }).find("pull() first"), std::string::npos);
  worker.pull();
  EXPECT_NE(config_error([&] { worker.push(); }).find("backward first"), std::string::npos);
  net->loss(batch(0, 0)).backward();
  const Tensor gradient = net->scale.grad();
  const float kept = gradient[2].item<float>();
  gradient[2] = std::numeric_limits<float>::quiet_NaN();
  try {
    worker.push();
    ADD_FAILURE() << "NaN was pushed";
  } catch (const NonFiniteGradient& error) {
    expect_words(error.what(), {"scale", "1 elements"});
  }
  gradient[2] = kept;
  worker.push();
  EXPECT_NE(config_error([&] { worker.push(); }).find("pull() first"), std::string::npos);
  worker.pull();
  net->loss(batch(0, 1)).backward();
  const Tensor was = net->scale.data();
  net->scale.set_data(at::ones({6}));
  expect_words(config_error([&] { worker.push(); }), {"scale has become Float [6], and was Float [5]"});
  net->scale.set_data(was);
  net->scale.mutable_grad() = at::ones({5});
  worker.push();
  worker.finish();
  worker.finish();
  EXPECT_NE(config_error([&] { worker.pull(); }).find("finished"), std::string::npos);
}

TEST(ParameterServer, NothingIsLeftWhenTheyHaveEnded) {
  if (server_counts().empty()) GTEST_SKIP();
  const AsyncOptions options{.servers = server_counts().front(), .staleness = 1};
  std::optional<messages::Held> before;
  for (int round = 0; round < 4; ++round) {
    if (rank() < options.servers) {
      ParameterServer server(world(), options);
      server.serve(*sgd()({server.parameter()}));
    } else {
      Net net;
      AsyncWorker worker(*net, world(), options);
      for (int step = 0; step < 2 + rank(); ++step) {
        worker.pull();
        net->loss(batch(rank(), step)).backward();
        worker.push();
      }
    }
    barrier(world());
    if (!before) before.emplace();  // with the threads that are there once and for all
  }
  EXPECT_TRUE(messages::Held::becomes_at_most(*before));
  barrier(world());
}

TEST(ParameterServer, ParametersThatAreNotFiniteAreNotExchanged) {
  const AsyncOptions options{.rule = AsyncRule::kElastic, .staleness = std::nullopt};
  if (rank() == 0) {
    ParameterServer server(world(), options);
    server.serve();
    EXPECT_TRUE(server.parameter().isfinite().all().item<bool>());
    return;
  }
  Net net;
  AsyncWorker worker(*net, world(), options);
  worker.pull();
  const at::NoGradGuard no_grad;
  net->scale[1] = std::numeric_limits<float>::infinity();
  try {
    worker.push();
    ADD_FAILURE() << "an infinity was pushed";
  } catch (const NonFiniteGradient& error) {
    expect_words(error.what(), {"1 elements of scale"});
  }
  worker.pull();
  worker.push();
}

}  // namespace
}  // namespace reef
