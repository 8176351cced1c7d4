// Servers and workers over real processes, against one process that does the same, and against their own
// logs. Run as several ranks by tests/support/ranks.py.
#include "reef/parameter_server.h"

#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "messages.h"
#include "reef/point_to_point.h"
#include "reef/shard_layout.h"

namespace reef {
namespace {

using at::Tensor;
using messages::config_error;
using messages::expect_words;
using messages::rank;
using messages::same;
using messages::size;
using messages::world;
using Kind = AsyncEvent::Kind;
using Floats = std::vector<float>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(3);
    up = register_module("up", torch::nn::Linear(17, 33));
    down = register_module("down", torch::nn::Linear(33, 5));
    scale = register_parameter("scale", torch::ones({5}));
    frozen = register_parameter("frozen", torch::full({3}, 2.0), /*requires_grad=*/false);
  }
  Tensor loss(const Tensor& x) { return (down(torch::gelu(up(x))) * scale * frozen[0]).pow(2).mean(); }
  torch::nn::Linear up{nullptr}, down{nullptr};
  Tensor scale, frozen;
};
TORCH_MODULE(Net);

std::vector<Tensor> trained(const Net& net) {
  std::vector<Tensor> found;
  for (const Tensor& p : net->parameters()) {
    if (p.requires_grad()) found.push_back(p);
  }
  return found;
}

Tensor batch(int worker, std::int64_t clock) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * worker + clock));
  return at::randn({4, 17}, generator);
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;
Make sgd() {
  return [](std::vector<Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  };
}
Make adam() {
  return [](std::vector<Tensor> parameters) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(0.01));
  };
}

/// How many servers there can be beside one to three workers.
std::vector<int> server_counts() {
  std::vector<int> counts;
  for (const int servers : {1, 2}) {
    if (size() > servers && size() - servers <= 3) counts.push_back(servers);
  }
  return counts;
}

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

// ---- a real run, done again from its log
// ---------------------------------------------------------------------

struct Flat {
  std::vector<std::int64_t> offsets;
  ShardLayout layout;

  Flat(const Net& net, int servers) {
    std::vector<ShardItem> items;
    for (const Tensor& p : trained(net)) items.push_back({p.numel(), 4, 0});
    layout = plan_shards(items, servers, std::numeric_limits<std::int64_t>::max());
  }
  Tensor place(const Tensor& flat, std::size_t i, const Tensor& like) const {
    const ShardPiece& piece = layout.buckets.front().items[i];
    return flat.narrow(0, piece.offset, piece.elements).view(like.sizes());
  }
};

Tensor as_tensor(std::span<const float> values) {
  return at::tensor(at::ArrayRef<float>(values.data(), values.size()), at::kFloat);
}

void copy_to(const Tensor& tensor, std::span<float> values) {
  std::copy_n(tensor.contiguous().const_data_ptr<float>(), values.size(), values.begin());
}

constexpr float kLocalRate = 0.05F;  // of workers, with the elastic rule

/// All of it in this process: whose bits the real run must have.
std::vector<Floats> replayed(const std::vector<AsyncLog>& logs, const Make& make) {
  const auto servers = static_cast<int>(logs.size());
  const bool elastic = logs.front().options.rule == AsyncRule::kElastic;
  const Net net;
  const Flat flat(net, servers);
  Tensor whole = at::zeros({flat.layout.elements(0)});
  const auto parameters = trained(net);
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      flat.place(whole, i, parameters[i]).copy_(parameters[i]);
  }
  std::vector<Floats> slices;
  std::vector<Tensor> stepped;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  const std::int64_t elements = flat.layout.buckets.front().slice_elements;
  for (int server = 0; server < servers; ++server) {
    const Tensor slice = whole.narrow(0, server * elements, elements);
    slices.emplace_back(slice.const_data_ptr<float>(), slice.const_data_ptr<float>() + elements);
    stepped.push_back(slice.clone().requires_grad_());
    optimizers.push_back(make({stepped.back()}));
  }
  AsyncModel model;
  model.push = [&](int worker, std::int64_t clock, std::span<const float> given, std::span<float> pushed) {
    const Tensor read = as_tensor(given);
    const Tensor made = elastic ? read.clone() : at::zeros_like(read);
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < parameters.size(); ++i)
        parameters[i].copy_(flat.place(read, i, parameters[i]));
    }
    for (const Tensor& p : parameters) p.mutable_grad().reset();
    Net(net)->loss(batch(worker, clock)).backward();
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor place = flat.place(made, i, parameters[i]);
      if (elastic) {
        place.copy_(parameters[i] - parameters[i].grad() * kLocalRate);
      } else {
        place.copy_(parameters[i].grad());
      }
    }
    copy_to(made, pushed);
  };
  model.step = [&](int server, std::span<float> slice, std::span<const float> gradient, double rate) {
    const Tensor& parameter = stepped[static_cast<std::size_t>(server)];
    auto& optimizer = *optimizers[static_cast<std::size_t>(server)];
    const double lr = optimizer.param_groups().front().options().get_lr();
    parameter.mutable_grad() = as_tensor(gradient);
    optimizer.param_groups().front().options().set_lr(lr * rate);
    optimizer.step();
    optimizer.param_groups().front().options().set_lr(lr);
    copy_to(parameter.detach(), slice);
  };
  return replay_async(logs, slices, model);
}

/// Sends every server's log and slice to the last rank, which does the run again.
void expect_that_the_log_replays(const ParameterServer* server, int servers, const Make& make) {
  const int judge = size() - 1;
  if (server != nullptr) {
    const std::string text = server->log().text();
    send(at::tensor(std::vector<std::uint8_t>(text.begin(), text.end()), at::kByte), judge, world(), 1);
    send(server->parameter().detach(), judge, world(), 2);
  }
  if (rank() != judge) return;
  std::vector<AsyncLog> logs;
  std::vector<Floats> ends;
  for (int each = 0; each < servers; ++each) {
    const Tensor bytes = receive(each, world(), 1);
    const auto* text = static_cast<const char*>(bytes.const_data_ptr());
    logs.push_back(read_async_log({text, static_cast<std::size_t>(bytes.numel())}));
    const Tensor end = receive(each, world(), 2);
    ends.emplace_back(end.const_data_ptr<float>(), end.const_data_ptr<float>() + end.numel());
  }
  EXPECT_EQ(replayed(logs, make), ends) << logs.front().text();
}

void sleep_some(std::mt19937& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 6000));
}

/// What a worker of this test does between a pull and a push.
void compute(Net& net, int worker, std::int64_t clock, AsyncRule rule) {
  for (const Tensor& p : trained(net)) p.mutable_grad().reset();
  net->loss(batch(worker, clock)).backward();
  if (rule != AsyncRule::kElastic) return;
  const at::NoGradGuard no_grad;
  for (const Tensor& p : trained(net)) p.copy_(p - p.grad() * kLocalRate);
}

TEST(ParameterServer, TheLogOfARealRunReplaysBitForBit) {
  constexpr int kPushes = 8;
  const std::vector<std::optional<std::int64_t>> stalenesses = {0, 1, 3, std::nullopt};
  for (const int servers : server_counts()) {
    for (const auto rule :
         {AsyncRule::kPlain, AsyncRule::kStalenessAware, AsyncRule::kDelayCompensated, AsyncRule::kElastic}) {
      for (const auto& staleness : stalenesses) {
        const AsyncOptions options{
            .servers = servers, .rule = rule, .staleness = staleness, .compensation = 0.5};
        const Make make = rule == AsyncRule::kDelayCompensated ? adam() : sgd();
        if (rank() < servers) {
          ParameterServer server(world(), options);
          if (rule == AsyncRule::kElastic) {
            server.serve();
          } else {
            server.serve(*make({server.parameter()}));
          }
          expect_that_the_log_replays(&server, servers, make);
          continue;
        }
        std::mt19937 random(static_cast<unsigned>(rank()));
        {
          Net net;
          AsyncWorker worker(*net, world(), options);
          for (int step = 0; step < kPushes; ++step) {
            if (step == 0 || rule != AsyncRule::kElastic) worker.pull();
            sleep_some(random);
            compute(net, rank() - servers, worker.clock(), rule);
            worker.push();
          }
          worker.finish();
        }
        expect_that_the_log_replays(nullptr, servers, make);
      }
    }
  }
}

TEST(ParameterServer, WorkersThatLeaveAndComeBackAreInTheLog) {
  constexpr int kRounds = 24;
  const std::vector<std::optional<std::int64_t>> stalenesses = {0, 2, std::nullopt};
  for (const int servers : server_counts()) {
    for (const auto rule : {AsyncRule::kDelayCompensated, AsyncRule::kElastic}) {
      for (const auto& staleness : stalenesses) {
        const AsyncOptions options{.servers = servers, .rule = rule, .staleness = staleness};
        if (rank() < servers) {
          ParameterServer server(world(), options);
          if (rule == AsyncRule::kElastic) {
            server.serve();
          } else {
            server.serve(*sgd()({server.parameter()}));
          }
          EXPECT_TRUE(server.removed().empty());
          expect_that_the_log_replays(&server, servers, sgd());
          continue;
        }
        std::mt19937 random(static_cast<unsigned>(rank() * 7));
        {
          Net net;
          AsyncWorker worker(*net, world(), options);
          bool pulled = false;
          for (int round = 0; round < kRounds; ++round) {
            if (random() % 5 == 0) {
              worker.leave();
              EXPECT_NE(config_error([&] { worker.pull(); }).find("join()"), std::string::npos);
              sleep_some(random);
              worker.join();
              pulled = false;
              continue;
            }
            if (!pulled || rule != AsyncRule::kElastic) worker.pull();
            pulled = true;
            if (random() % 6 == 0) worker.pull();  // once more
            compute(net, rank() - servers, worker.clock(), rule);
            worker.push();
          }
        }
        expect_that_the_log_replays(nullptr, servers, sgd());
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
  expect_words(config_error([&] { worker.push(); }), {"scale", "has become"});
  net->scale.set_data(was);
  net->scale.mutable_grad() = at::ones({5});
  worker.push();
  worker.finish();
  worker.finish();
  EXPECT_NE(config_error([&] { worker.pull(); }).find("finished"), std::string::npos);
}

}  // namespace
}  // namespace reef
