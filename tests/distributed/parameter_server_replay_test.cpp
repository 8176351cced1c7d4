// Real runs of servers and workers, done again by one process from their logs, to the bit. Run as several
// ranks by tests/support/ranks.py.
#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "messages.h"
#include "parameter_server_net.h"
#include "reef/parameter_server.h"
#include "reef/point_to_point.h"
#include "reef/shard_layout.h"

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
using messages::rank;
using messages::size;
using messages::world;
using Floats = std::vector<float>;

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

TEST(ParameterServerReplay, TheLogOfARealRunReplaysBitForBit) {
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

TEST(ParameterServerReplay, WorkersThatLeaveAndComeBackAreInTheLog) {
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

}  // namespace
}  // namespace reef
