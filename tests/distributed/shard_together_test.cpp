// What all ranks do together: states while memory runs out on one, groups of an optimizer, and what is
// refused on all since it is wrong on one, or cannot be divided.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "reef/part.h"
#include "reef/shard.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

/// The allocator that was there, but for one allocation.
class FailingAllocator final : public c10::Allocator {
 public:
  FailingAllocator() : below_(*c10::GetAllocator(at::kCPU)) { c10::SetAllocator(at::kCPU, this, kHighest); }
  ~FailingAllocator() override { c10::SetAllocator(at::kCPU, &below_, kHighest); }
  /// The one after so many others of some size fails; the exchange in which it is said is smaller.
  void arm(int others) { left_ = others; }
  /// The one after so many others of any size fails, of this thread.
  void arm_here(int others) {
    thread_ = std::this_thread::get_id();
    arm(others);
  }
  /// Whether it has.
  bool disarm() {
    thread_ = std::thread::id();
    return left_.exchange(kNever) == kFailed;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const std::thread::id only = thread_;
    if (only == std::thread::id() ? bytes >= 256 : bytes > 0 && only == std::this_thread::get_id()) {
      int left = left_;
      while (left >= 0 && !left_.compare_exchange_weak(left, left - 1)) {
      }
      TORCH_CHECK_WITH(OutOfMemoryError, left != 0, "no memory for ", bytes, " bytes");
    }
    return below_.allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return below_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static constexpr std::uint8_t kHighest = 255;
  static constexpr int kFailed = -1;
  static constexpr int kNever = -2;
  c10::Allocator& below_;
  std::atomic<int> left_{kNever};
  std::atomic<std::thread::id> thread_{std::thread::id()};
};

std::vector<std::int64_t> on_all_ranks(std::int64_t own) {
  const Tensor all = torch::zeros({size()}, torch::kLong);
  all[rank()] = own;
  all_reduce({all}, group(), Reduction::kSum);
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + size()};
}

/// A frozen parameter, a buffer, and parameters in several buckets.
struct SmallNetImpl : torch::nn::Module {
  explicit SmallNetImpl(std::uint64_t seed) {
    torch::manual_seed(seed);
    up = register_module("up", torch::nn::Linear(24, 40));
    down = register_module("down", torch::nn::Linear(40, 24));
    frozen = register_parameter("frozen", torch::randn({24, 24}), /*requires_grad=*/false);
    scale = register_buffer("scale", torch::randn({300}));
  }
  Tensor forward(const Tensor& x) {
    return down(torch::tanh(up(torch::matmul(x, frozen.to(x.scalar_type()))))).pow(2).mean();
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  Tensor frozen, scale;
};
TORCH_MODULE(SmallNet);

void expect_same(const StateDict& found, const StateDict& expected, const std::string& text) {
  EXPECT_EQ(found.size(), expected.size()) << text;
  for (const auto& entry : expected) {
    EXPECT_TRUE(torch::equal(found.at(entry.key()), entry.value())) << text << entry.key();
  }
}
void expect_same(const OptimizerState& found, const OptimizerState& expected, const std::string& text) {
  ASSERT_EQ(found.states.size(), expected.states.size()) << text;
  for (std::size_t i = 0; i < expected.states.size(); ++i) {
    for (std::size_t k = 0; k < expected.states[i].second.size(); ++k) {
      const auto& [key, value] = expected.states[i].second[k];
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const Tensor own = found.states[i].second[k].second.toTensor();
      EXPECT_TRUE(torch::equal(own, value.toTensor())) << text << key;
    }
  }
}

struct Trained {
  Trained(Stage stage, bool masters)
      : net(7),
        sharded(shard(*net, group(),
                      {.stage = stage,
                       .bucket_bytes = 3000,
                       .mixed_precision = masters ? std::optional(MixedPrecision{}) : std::nullopt})),
        optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-2)) {
    net->forward(torch::ones({2, 24}, masters ? at::kBFloat16 : at::kFloat)).backward();
    optimizer.step();
  }
  SmallNet net;
  Shard sharded;
  torch::optim::AdamW optimizer;
};

// Whichever allocation fails on one rank, all have an error that names it, nothing has changed, and the same
// call works afterwards.
TEST(ShardTogether, MemoryThatRunsOutOnOneRankIsHeardOfOnAll) {
  const Ledger ledger;  // whose allocator stays
  FailingAllocator memory;
  for (const bool masters : {false, true}) {
    for (const Stage stage : kStages) {
      Trained all(stage, masters);
      const StateDict model = all.sharded.full_state_dict();
      const OptimizerState state = all.sharded.full_optimizer_state(all.optimizer);
      StateDict other;
      for (const auto& entry : model) other.insert(entry.key(), entry.value() + 1);
      // A file has some state for each parameter; that of another step.
      OptimizerState doubled = state;
      for (auto& [id, values] : doubled.states) {
        for (auto& [key, value] : values) {
          if (value.isTensor() && value.toTensor().dim() > 0) value = value.toTensor() * 2;
        }
      }
      const bool first = rank() == 0;
      const std::vector<std::pair<const char*, std::function<void()>>> calls = {
          {"full_state_dict", [&] { all.sharded.full_state_dict(); }},
          {"full_state_dict of rank 0", [&] { all.sharded.full_state_dict(true); }},
          {"full_optimizer_state", [&] { all.sharded.full_optimizer_state(all.optimizer); }},
          {"load_state_dict", [&] { all.sharded.load_state_dict({other}); }},
          {"load_state_dict of rank 0",
           [&] { all.sharded.load_state_dict(first ? std::vector{other} : std::vector<StateDict>{}); }},
          {"load_optimizer_state", [&] { all.sharded.load_optimizer_state(all.optimizer, {doubled}); }},
          {"load_optimizer_state of rank 0",
           [&] { all.sharded.load_optimizer_state(all.optimizer, {first ? doubled : OptimizerState{}}); }}};
      for (const auto& [name, call] : calls) {
        for (const int failing : {0, size() - 1}) {
          int others = 0;
          for (bool failed = true; failed; others += 1 + others / 4) {
            const std::string text = std::string(name) + ", stage " +
                                     std::to_string(static_cast<int>(stage)) + (masters ? ", masters" : "") +
                                     ", the allocation after " + std::to_string(others) + " on rank " +
                                     std::to_string(failing) + ": ";
            std::string said;
            if (rank() == failing) memory.arm(others);
            try {
              call();
            } catch (const std::exception& error) {
              said = message_of(error);
            }
            const std::int64_t own = (rank() == failing && memory.disarm() ? 2 : 0) + (said.empty() ? 0 : 1);
            const std::vector<std::int64_t> told = on_all_ranks(own);
            failed = told[static_cast<std::size_t>(failing)] >= 2;
            for (const std::int64_t one : told) ASSERT_EQ(one % 2, failed ? 1 : 0) << text << said;
            const std::string expected = "rank " + std::to_string(failing) + ": no memory";
            EXPECT_EQ(said.starts_with(expected), failed && rank() != failing) << text << said;
            if (!failed || others > 3) continue;
            expect_same(all.sharded.full_state_dict(), model, text);
            expect_same(all.sharded.full_optimizer_state(all.optimizer), state, text);
          }
          EXPECT_GT(others, failing == 0 ? 1 : 0) << name << ": nothing has failed";
          all.sharded.load_state_dict({model});
          all.sharded.load_optimizer_state(all.optimizer, {state});
        }
      }
    }
  }
}

// Whichever allocation fails, on all ranks, while parameters are read that may have been stepped: whoever
// reads them next reads them.
TEST(ShardTogether, MemoryThatRunsOutWhileParametersAreReadLeavesThemReadable) {
  const Ledger ledger;  // whose allocator stays
  FailingAllocator memory;
  for (const bool masters : {false, true}) {
    for (const Stage stage : kStages) {
      for (const bool steps : {false, true}) {
        Trained all(stage, masters);
        bool failed = true;
        for (int others = 0; failed; ++others) {
          const std::string text = "stage " + std::to_string(static_cast<int>(stage)) +
                                   (masters ? ", masters" : "") + (steps ? ", stepped" : "") +
                                   ", the allocation after " + std::to_string(others);
          all.net->forward(torch::ones({2, 24}, masters ? at::kBFloat16 : at::kFloat)).backward();
          if (steps) all.optimizer.step();
          const torch::NoGradGuard no_grad;
          const auto read = [&] {
            return std::pair(all.net->up->weight.clone(), all.net->down->bias.clone());
          };
          if (!steps) read();  // a step may still follow, so the next read asks once more
          std::optional<std::pair<Tensor, Tensor>> first;
          std::string said;
          memory.arm_here(others);
          try {
            first = read();
          } catch (const std::exception& error) {
            said = message_of(error);
          }
          failed = memory.disarm();  // or an operator within the one that failed has asked once more
          if (!first) {
            EXPECT_TRUE(failed && said.find("no memory") != std::string::npos) << text << said;
          }
          const auto second = read();
          const StateDict whole = all.sharded.full_state_dict();
          for (const auto& [weight, bias] : {first.value_or(second), second}) {
            EXPECT_TRUE(torch::equal(weight, whole.at("up.weight").to(weight.dtype()))) << text;
            EXPECT_TRUE(torch::equal(bias, whole.at("down.bias").to(bias.dtype()))) << text;
          }
        }
      }
    }
  }
}

// By name and whole shape: on every rank the groups of one process, none of them empty.
TEST(ShardTogether, GroupsAreThoseOfOneProcess) {
  const auto rule = [](const std::string& name, at::IntArrayRef shape) {
    return std::string(name == "tied" ? "tied" : shape.size() > 1 ? "decay" : "none");
  };
  for (const Stage stage : kStages) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    std::vector<std::pair<std::string, std::vector<std::vector<std::int64_t>>>> expected;
    for (const auto& item : net->named_parameters()) {
      if (item.key() == "tokens.weight" || !item.value().requires_grad()) continue;  // that is "tied"
      const std::string key = rule(item.key(), item.value().sizes());
      auto found =
          std::find_if(expected.begin(), expected.end(), [&](auto& one) { return one.first == key; });
      if (found == expected.end()) found = expected.insert(found, {key, {}});
      found->second.push_back(item.value().sizes().vec());
    }
    const auto groups = sharded.param_groups(rule);
    ASSERT_EQ(groups.size(), expected.size());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      EXPECT_EQ(groups[g].key, expected[g].first);
      ASSERT_EQ(groups[g].parameters.size(), expected[g].second.size());
      for (std::size_t i = 0; i < groups[g].parameters.size(); ++i) {
        EXPECT_EQ(whole_shape_of(groups[g].parameters[i]), expected[g].second[i]);
        EXPECT_EQ(groups[g].parameters[i].dim(), static_cast<std::int64_t>(expected[g].second[i].size()));
      }
    }
  }
}

template <class Call>
void expect_refused(const Call& call, const std::string& text) {
  try {
    call();
    ADD_FAILURE() << "no error: " << text;
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find(text), std::string::npos) << error.what();
  }
}

TEST(ShardTogether, AnOptimizerThatIsNotTheSameOrNotByElementIsRefused) {
  for (const Stage stage : kStages) {
    Net net(7);
    Shard sharded = shard(*net, group(), {.stage = stage, .bucket_bytes = 5000});
    torch::optim::SGD sgd(sharded.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::AdamW adamw(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
    net->forward(batch(Ranks::kAlike, rank(), 0)).backward();
    sgd.step();
    adamw.step();
    const OptimizerState of_sgd = sharded.full_optimizer_state(sgd);
    const OptimizerState of_adamw = sharded.full_optimizer_state(adamw);
    if (size() > 1) {
      torch::optim::Optimizer& own = rank() == 0 ? static_cast<torch::optim::Optimizer&>(sgd) : adamw;
      const std::string text =
          "the optimizer is torch::optim::SGD on rank 0 and torch::optim::AdamW on rank 1";
      expect_refused([&] { sharded.full_optimizer_state(own); }, text);
      expect_refused([&] { sharded.load_optimizer_state(own, {of_sgd}); }, text);
    }
    expect_refused([&] { sharded.load_optimizer_state(adamw, {of_sgd}); }, "has the option betas, and");
    expect_refused([&] { sharded.load_optimizer_state(sgd, {of_adamw}); }, "has the option momentum, and");
    OptimizerState without = of_adamw, rows = of_adamw;
    for (auto& [key, value] : without.states[0].second) {
      if (key == "exp_avg_sq") key = "exp_avg_row";
    }
    expect_refused([&] { sharded.load_optimizer_state(adamw, {without}); }, "has no exp_avg_sq, which");
    for (auto& [key, value] : rows.states[0].second) {
      if (key == "exp_avg") value = torch::zeros({1, 3});
    }
    expect_refused([&] { sharded.load_optimizer_state(adamw, {rows}); },
                   "has exp_avg of the shape [1, 3] for");
    expect_same(sharded.full_optimizer_state(adamw), of_adamw, "unchanged: ");

    torch::optim::LBFGS lbfgs(sharded.parameters());
    if (stage == Stage::kReplicate) {
      EXPECT_NO_THROW(sharded.full_optimizer_state(lbfgs));
    } else {
      expect_refused([&] { sharded.full_optimizer_state(lbfgs); }, "which needs whole parameters");
      expect_refused([&] { sharded.load_optimizer_state(lbfgs, {of_sgd}); }, "which needs whole parameters");
    }
  }
}

// What a shard would take apart is refused, and names both.
TEST(ShardTogether, TensorsInTheSameMemoryStayTogetherOrAreRefused) {
  struct Memory : torch::nn::Module {
    Tensor all = torch::ones({2000});
    Tensor parameter(const char* name, std::int64_t first, bool trained = true) {
      return register_parameter(name, all.narrow(0, first, 600).detach(), trained);
    }
  };
  struct Row {
    const char* name;
    std::function<void(Memory&)> make;
    bool apart;    ///< nothing is in the same memory
    bool rounded;  ///< it is taken apart only if frozen parameters are rounded
  };
  const std::vector<Row> rows = {
      {"beside each other", [](Memory& m) { m.parameter("a", 0), m.parameter("b", 600); }, true, false},
      {"two trained ones", [](Memory& m) { m.parameter("a", 0), m.parameter("b", 0); }, false, false},
      {"they overlap", [](Memory& m) { m.parameter("a", 0), m.parameter("b", 599); }, false, false},
      {"a frozen one", [](Memory& m) { m.parameter("a", 0), m.parameter("b", 0, false); }, false, false},
      {"a buffer",
       [](Memory& m) {
         m.parameter("a", 0);
         m.register_buffer("b", m.all.narrow(0, 100, 5));
       },
       false, false},
      {"two frozen ones",
       [](Memory& m) { m.parameter("a", 0, false), m.parameter("b", 0, false), m.parameter("c", 900); }, true,
       false},
      {"a buffer of a frozen one",
       [](Memory& m) {
         m.parameter("a", 0, false);
         m.register_buffer("b", m.all.narrow(0, 100, 5));
         m.parameter("c", 900);
       },
       true, true}};
  for (const Row& row : rows) {
    for (const Stage stage : kStages) {
      for (const bool masters : {false, true}) {
        Memory module;
        row.make(module);
        ShardOptions options{.stage = stage};
        if (masters) options.mixed_precision = MixedPrecision{};
        const bool stays = stage == Stage::kReplicate && !masters;
        const std::string text = std::string(row.name) + ", stage " + std::to_string(static_cast<int>(stage));
        if ((row.apart || stays) && !(masters && row.rounded)) {
          const Shard sharded = shard(module, group(), options);
          const auto named = module.named_parameters();
          if (std::string(row.name) == "two frozen ones") {
            EXPECT_TRUE(named["a"].is_alias_of(named["b"])) << text;
          }
        } else {
          expect_refused([&] { shard(module, group(), options); },
                         "given a and b, which are two tensors in the same");
        }
      }
    }
  }
}

}  // namespace
}  // namespace reef::shard_tests
