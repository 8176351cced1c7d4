// What a pass of backward is: it ends with the outermost graph, on all ranks or on none.
#include "distributed/shard_net.h"
#include "reef/error.h"

namespace reef::shard_tests {
namespace {

std::string where(Stage stage, std::int64_t bucket_bytes) {
  return "stage " + std::to_string(static_cast<int>(stage)) + ", buckets of " + std::to_string(bucket_bytes);
}

constexpr const char* kNoMemory = "this rank is out of memory";

// As it was in forward, and an error in backward while `fails` says so.
struct Fails : torch::autograd::Function<Fails> {
  static inline bool fails = false;
  static inline int others = 0;  ///< so many of these before it do not
  static inline std::string why = kNoMemory;
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    if (fails && others-- <= 0) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, why);
    return gradients;
  }
};

// Runs a graph of its own within backward, as a re-entrant checkpoint does.
struct Reentrant : torch::autograd::Function<Reentrant> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        torch::nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    const torch::NoGradGuard no_grad;
    return (*layer)(x).tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto& layer = *reinterpret_cast<torch::nn::Linear*>(context->saved_data["layer"].toInt());
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    const at::AutoGradMode enabled(true);
    Fails::apply(layer(x).tanh()).backward(gradients[0]);
    return {x.grad(), Tensor()};
  }
};

struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    torch::manual_seed(11);
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(40, 40)));
    layers.push_back(layers[0]);  // used in two of the graphs that run within backward
  }
  Tensor forward(Tensor x, bool reentrant, int fails_after) {
    for (int i = 0; i < 5; ++i) {
      x = reentrant ? Reentrant::apply(x, &layers[static_cast<std::size_t>(i)])
                    : layers[static_cast<std::size_t>(i)](x).tanh();
      if (i == fails_after) x = Fails::apply(x);
    }
    return x.pow(2).mean();
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Chain);

Tensor input(int of_rank, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * step + of_rank);
  return torch::randn({3, 40}, generator).requires_grad_(true);
}

struct Alone {
  Chain chain;
  torch::optim::SGD optimizer{chain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  void step(int number) {
    optimizer.zero_grad();
    for (int of = 0; of < size(); ++of) chain(input(of, number), false, -1).backward();
    for (const Tensor& parameter : chain->parameters()) parameter.grad().div_(size());
    optimizer.step();
  }
};

TEST(ShardPass, GraphsWithinEachOtherAreOnePass) {
  for (const Stage stage : kStages) {
    for (const std::int64_t bucket_bytes : {std::int64_t{7000}, std::int64_t{25} << 20}) {
      Chain plain, reentrant;
      Shard of_plain = shard(*plain, group(), {.stage = stage, .bucket_bytes = bucket_bytes});
      Shard of_reentrant = shard(*reentrant, group(), {.stage = stage, .bucket_bytes = bucket_bytes});
      torch::optim::SGD plain_optimizer(of_plain.parameters(), 0.1);
      torch::optim::SGD reentrant_optimizer(of_reentrant.parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        plain(input(rank(), step), false, -1).backward();
        reentrant(input(rank(), step), true, -1).backward();
        plain_optimizer.step();
        reentrant_optimizer.step();
        plain_optimizer.zero_grad();
        reentrant_optimizer.zero_grad();
      }
      expect_same(*reentrant, *plain, where(stage, bucket_bytes));
      if (stage == Stage::kParameters) continue;  // what is computed twice is gathered twice
      EXPECT_EQ(of_reentrant.sent_bytes(), of_plain.sent_bytes());
    }
  }
}

TEST(ShardPass, APassThatFailsOnOneRankIsAbandonedOnAll) {
  for (const Stage stage : kStages) {
    for (const std::int64_t bucket_bytes : {std::int64_t{7000}, std::int64_t{25} << 20}) {
      for (const int fails_after : {0, 2, 4}) {  // the last: before any gradient is there
        const std::string text = where(stage, bucket_bytes) + ", after layer " + std::to_string(fails_after);
        Chain chain;
        Shard sharded = shard(*chain, group(), {.stage = stage, .bucket_bytes = bucket_bytes});
        torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        Alone alone;
        const int failing = size() - 1;
        for (int step = 0; step < 4; ++step) {
          optimizer.zero_grad();
          Fails::fails = step == 2 && rank() == failing;
          std::string told;
          try {
            chain(input(rank(), step), false, fails_after).backward();
          } catch (const c10::OutOfMemoryError& error) {
            told = "own error";
          } catch (const PassAbandoned& error) {
            told = "rank " + std::to_string(error.rank());
            const std::string said = "backward has failed on " + told + " (" + kNoMemory + "), so";
            EXPECT_NE(message_of(error).find(said), std::string::npos) << text << ": " << message_of(error);
          }
          EXPECT_EQ(told, step != 2           ? ""
                          : rank() == failing ? "own error"
                                              : "rank " + std::to_string(failing))
              << text;
          if (!told.empty()) {
            for (const Tensor& part : sharded.parameters()) EXPECT_FALSE(part.grad().defined()) << text;
            continue;
          }
          optimizer.step();
          alone.step(step);
        }
        Fails::fails = false;
        expect_same(*chain, *alone.chain, text);
      }
    }
  }
}

// Of whatever is thrown: its first line, not longer than it is of use, in whole characters.
TEST(ShardPass, TheOthersAreToldWhatWasThrown) {
  std::string accents;
  for (int i = 0; i < 400; ++i) accents += "\u00e9";
  const std::vector<std::pair<std::string, std::string>> rows = {
      {kNoMemory, kNoMemory},
      {"line one\nline two", "line one"},
      {"", "it ended before all gradients were there"},
      {std::string(300, 'x'), std::string(300, 'x')},
      {std::string(1000, 'x'), std::string(297, 'x') + "..."},
      {accents, accents.substr(0, 296) + "..."},
  };
  const int failing = size() - 1;
  for (const Stage stage : kStages) {
    for (const bool reentrant : {false, true}) {
      Chain chain;
      Shard sharded = shard(*chain, group(), {.stage = stage, .bucket_bytes = 7000});
      torch::optim::SGD optimizer(sharded.parameters(), 0.1);
      const auto told = [&](const std::string& why, bool fails) {
        Fails::why = why;
        Fails::others = reentrant ? 2 : 0;  // by then the pass has reached parameters
        Fails::fails = fails && rank() == failing;
        std::string message;
        try {
          chain(input(rank(), 0), reentrant, reentrant ? -1 : 2).backward();
        } catch (const PassAbandoned& error) {
          message = message_of(error);
        } catch (const c10::OutOfMemoryError&) {
          message = "own error";
        }
        Fails::fails = false;
        Fails::others = 0;
        Fails::why = kNoMemory;
        return message;
      };
      const auto right = [&](const std::string& why) {
        if (rank() == failing) return std::string("own error");
        return "rank " + std::to_string(rank()) + ": backward has failed on rank " + std::to_string(failing) +
               " (" + why + "), so this pass is abandoned on every rank";
      };
      for (const auto& [why, reason] : rows) {
        const std::string message = told(why, true);
        EXPECT_EQ(message.substr(0, right(reason).size()), right(reason))
            << where(stage, 7000) << ", " << reentrant;
        EXPECT_EQ(told(why, false), "") << where(stage, 7000);
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  }
}

TEST(ShardPass, TheOthersAreToldWhatIsWrongWithTheModuleOfOne) {
  for (const Stage stage : kStages) {
    Chain chain;
    Shard sharded = shard(*chain, group(), {.stage = stage, .bucket_bytes = 7000});
    const int changed = size() - 1;
    if (rank() == changed) chain->register_parameter("more", torch::randn({3}));
    try {
      chain(input(rank(), 0), false, -1).backward();
      ADD_FAILURE() << where(stage, 7000);
    } catch (const ConfigError& error) {
      EXPECT_EQ(rank(), changed);
    } catch (const PassAbandoned& error) {
      EXPECT_EQ(error.rank(), changed);
      EXPECT_NE(message_of(error).find("(parameter more of the module"), std::string::npos)
          << message_of(error);
    }
  }
}

TEST(ShardPass, APassWithoutSyncThatFailsMakesAllDropWhatWasAddedUp) {
  for (const Stage stage : kStages) {
    Chain chain;
    Shard sharded = shard(*chain, group(), {.stage = stage, .bucket_bytes = 7000});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    Alone alone;
    const int failing = size() - 1;
    const auto backward = [&](int step) {
      try {
        chain(input(rank(), step), false, 2).backward();
      } catch (const c10::OutOfMemoryError&) {
        return std::string("own error");
      } catch (const PassAbandoned& error) {
        EXPECT_NE(message_of(error).find(kNoMemory), std::string::npos) << message_of(error);
        return "rank " + std::to_string(error.rank());
      }
      return std::string();
    };
    const std::string others = "rank " + std::to_string(failing);
    {
      const Shard::NoSync paused(sharded);
      EXPECT_EQ(backward(0), "");
      Fails::fails = rank() == failing;
      // Where parameters are divided the others hear of it at once.
      EXPECT_EQ(backward(1), rank() == failing ? "own error" : stage == Stage::kParameters ? others : "");
      Fails::fails = false;
    }
    if (stage != Stage::kParameters || size() == 1) {
      EXPECT_EQ(backward(2), others);
    }
    optimizer.zero_grad();
    for (const int step : {3, 4}) {
      EXPECT_EQ(backward(step), "");
      optimizer.step();
      optimizer.zero_grad();
      alone.step(step);
    }
    expect_same(*chain, *alone.chain, where(stage, 7000));
  }
}

TEST(ShardPass, WhatHasOnlyBeenAddedUpIsNotStepped) {
  for (const Stage stage : {Stage::kOptimizer, Stage::kGradients, Stage::kParameters}) {
    Chain chain;
    Shard sharded = shard(*chain, group(), {.stage = stage, .bucket_bytes = 7000});
    torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    {
      const Shard::NoSync paused(sharded);
      chain(input(rank(), 7), false, -1).backward();
    }
    const auto has_elements = [](const Tensor& part) { return part.numel() > 0; };
    if (std::any_of(sharded.parameters().begin(), sharded.parameters().end(), has_elements)) {
      EXPECT_THROW(optimizer.step(), c10::Error) << where(stage, 7000);
    }
    optimizer.zero_grad();  // and so what was added up
    Alone alone;
    chain(input(rank(), 0), false, -1).backward();
    optimizer.step();
    alone.step(0);
    expect_same(*chain, *alone.chain, where(stage, 7000));
  }
}

// A program may keep gradients of one pass while the next makes others (multi-task training).
TEST(ShardPass, GradientsThatAProgramHoldsStay) {
  for (const Stage stage : kStages) {
    for (const std::int64_t bucket_bytes : {std::int64_t{7000}, std::int64_t{25} << 20}) {
      Chain chain;
      Shard sharded = shard(*chain, group(), {.stage = stage, .bucket_bytes = bucket_bytes});
      std::vector<Tensor> held, copies;
      for (int step = 0; step < 3; ++step) {
        for (const Tensor& part : sharded.parameters()) part.mutable_grad() = Tensor();
        chain(input(rank(), step), false, -1).backward();
        for (const Tensor& part : sharded.parameters()) {
          held.push_back(part.grad());
          copies.push_back(part.grad().clone());
        }
      }
      for (std::size_t i = 0; i < held.size(); ++i)
        EXPECT_TRUE(torch::equal(held[i], copies[i])) << where(stage, bucket_bytes) << ", number " << i;
    }
  }
}

TEST(ShardPass, AParameterThatIsUnfrozenIsTold) {
  for (const Stage stage : kStages) {
    Chain chain;
    for (const Tensor& parameter : chain->layers[0]->parameters()) parameter.set_requires_grad(false);
    Shard sharded = shard(*chain, group(), {.stage = stage});
    chain(input(rank(), 0), false, -1).backward();
    for (const Tensor& parameter : chain->layers[0]->parameters()) parameter.set_requires_grad(true);
    EXPECT_THROW(chain(input(rank(), 1), false, -1).backward(), ConfigError);
    EXPECT_THROW(sharded.full_state_dict(), ConfigError);
  }
}

// A shard for each layer, as one writes with fully_shard: none takes what is another's.
TEST(ShardPass, ManyShardsAtOnce) {
  if (size() > 2) GTEST_SKIP() << "each has threads of its own";
  constexpr int kLayers = 100;
  const auto layers = [] {
    torch::manual_seed(5);
    torch::nn::Sequential made;
    for (int i = 0; i < kLayers; ++i) made->push_back(torch::nn::Linear(16, 16));
    return made;
  };
  torch::nn::Sequential divided = layers(), alone = layers();
  std::vector<Shard> shards;
  std::vector<Tensor> parts;
  for (const auto& layer : *divided) {
    shards.push_back(
        shard(*layer.ptr(), group(), {.stage = Stage::kGradients, .reduction = Reduction::kSum}));
    for (const Tensor& part : shards.back().parameters()) parts.push_back(part);
  }
  torch::optim::SGD optimizer(parts, 0.5), optimizer_alone(alone->parameters(), 0.5);
  const auto loss = [](torch::nn::Sequential& net, int of, int step) {
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(10 * step + of);
    return net->forward(torch::randn({2, 16}, generator)).pow(2).sum();
  };
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    optimizer_alone.zero_grad();
    loss(divided, rank(), step).backward();
    for (int of = 0; of < size(); ++of) loss(alone, of, step).backward();
    optimizer.step();
    optimizer_alone.step();
  }
  expect_same(*divided, *alone, "100 shards");
}

// What one shard had is the next one's.
TEST(ShardPass, ManyShardsOneAfterAnother) {
  torch::nn::Linear layer(16, 16);
  for (int i = 0; i < 600; ++i) {
    const Shard one = shard(*layer, group(), {.stage = Stage::kOptimizer});
  }
}

}  // namespace
}  // namespace reef::shard_tests
