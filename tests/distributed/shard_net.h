#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "reef/budget.h"
#include "reef/clip_grad_norm.h"
#include "reef/grad_scaler.h"
#include "reef/ledger.h"
#include "reef/optim.h"
#include "reef/process_group.h"
#include "reef/shard.h"

// What the tests of reef::shard train, and what one process gets that accumulates over all ranks' batches.
namespace reef::shard_tests {

using at::Tensor;

inline const ProcessGroupPtr& group() {
  static const ProcessGroupPtr the_group = init_process_group();
  return the_group;
}
/// The backend lets go of what it has sent a moment after it says that it has.
inline std::int64_t settled_live_bytes() {
  std::int64_t bytes = allocator_live_bytes();
  for (int i = 0, still = 0; i < 2000 && still < 10; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::int64_t now = allocator_live_bytes();
    still = now == bytes ? still + 1 : 0;
    bytes = now;
  }
  return bytes;
}

inline int rank() { return group()->getRank(); }
inline int size() { return group()->getSize(); }

/// Uneven sizes, a tied weight, a frozen one, one that only batches with an even first token use, and one
/// that none does.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::uint64_t seed) {
    torch::manual_seed(seed);
    tokens = register_module("tokens", torch::nn::Embedding(37, 24));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({24})));
    up = register_module("up", torch::nn::Linear(24, 101));
    down = register_module("down", torch::nn::Linear(101, 24));
    even = register_parameter("even", torch::randn({24, 3}));
    never = register_parameter("never", torch::randn({700}));
    frozen = register_parameter("frozen", torch::randn({24}), /*requires_grad=*/false);
    tied = register_parameter("tied", tokens->weight);
    scale = register_buffer("scale", torch::randn({24}));
  }
  Tensor forward(const Tensor& batch) {
    Tensor h = norm(tokens(batch) + frozen * scale);
    h = h + down(torch::gelu(up(h)));
    if (batch[0][0].item<std::int64_t>() % 2 == 0) h = h + torch::matmul(torch::matmul(h, even), even.t());
    return torch::matmul(h, tied.t()).log_softmax(-1).select(-1, 3).mean().neg();
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  Tensor even, never, frozen, tied, scale;
};
TORCH_MODULE(Net);

/// Ranks that differ in what they use of the model; or `alike`, as Stage::kParameters needs them.
enum class Ranks { kDiffer, kAlike };
inline Ranks ranks_at(Stage stage) { return stage == Stage::kParameters ? Ranks::kAlike : Ranks::kDiffer; }

inline Tensor batch(Ranks ranks, int of_rank, int step, int micro = 0) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * of_rank + 10 * step + micro);
  Tensor made = torch::randint(37, {2, 5}, generator, torch::kLong);
  made[0][0] = (ranks == Ranks::kAlike ? 2 : 1) * of_rank + step;
  return made;
}

using Optimizer = std::shared_ptr<torch::optim::Optimizer>;
struct Case {
  const char* name;
  std::function<Optimizer(std::vector<Tensor>)> make;
};
inline const std::vector<Case> kCases = {
    {"momentum",
     [](std::vector<Tensor> all) {
       return std::make_shared<torch::optim::SGD>(all, torch::optim::SGDOptions(0.1).momentum(0.9));
     }},
    {"torch AdamW",
     [](std::vector<Tensor> all) {
       return std::make_shared<torch::optim::AdamW>(all, torch::optim::AdamWOptions(1e-2));
     }},
    {"reef AdamW",
     [](std::vector<Tensor> all) { return std::make_shared<optim::AdamW>(all, optim::AdamWOptions(1e-2)); }}};
constexpr Stage kStages[] = {Stage::kReplicate, Stage::kOptimizer, Stage::kGradients, Stage::kParameters};
constexpr int kSteps = 4;

inline std::string where(const Case& tested, Stage stage, std::int64_t bucket_bytes) {
  return std::string(tested.name) + ", stage " + std::to_string(static_cast<int>(stage)) + ", buckets of " +
         std::to_string(bucket_bytes);
}

inline void expect_same(torch::nn::Module& found, torch::nn::Module& expected, const std::string& text) {
  const auto theirs = expected.named_parameters();
  for (const auto& item : found.named_parameters()) {
    const Tensor& other = theirs[item.key()];
    EXPECT_TRUE(torch::equal(item.value(), other))
        << text << ": " << item.key() << " is off by " << (item.value() - other).abs().max().item<double>()
        << " on rank " << rank();
  }
}

/// A weight that is there under two names is one parameter.
inline std::vector<Tensor> parameters_of(const Net& net) {
  std::vector<Tensor> once;
  for (const auto& item : net->named_parameters()) {
    if (item.key() != "tied") once.push_back(item.value());
  }
  return once;
}

/// Gradients of one process, which accumulates over the batches of all ranks.
inline void accumulate(Net net, Ranks ranks, int step, Reduction reduction = Reduction::kMean) {
  for (int of = 0; of < size(); ++of) net->forward(batch(ranks, of, step)).backward();
  for (const Tensor& parameter : parameters_of(net)) {
    if (reduction == Reduction::kMean && parameter.grad().defined()) parameter.grad().div_(size());
  }
}

/// And its step.
inline void step_alone(Net net, const Optimizer& optimizer, Ranks ranks, int step,
                       Reduction reduction = Reduction::kMean) {
  optimizer->zero_grad();
  accumulate(std::move(net), ranks, step, reduction);
  optimizer->step();
}

/// Returns what one process gets. The first call computes it, later ones of the same arguments find it.
inline Net accumulated(const Case& tested, Ranks ranks, Reduction reduction) {
  static std::map<std::tuple<std::string, Ranks, Reduction>, Net> known;
  const auto [found, is_new] = known.try_emplace({tested.name, ranks, reduction}, 7);
  Net net = found->second;
  if (!is_new) return net;
  const Optimizer optimizer = tested.make(parameters_of(net));
  for (int step = 0; step < kSteps; ++step) step_alone(net, optimizer, ranks, step, reduction);
  return net;
}

/// kSteps of this rank's batches. Parameters are whole afterwards.
inline void train_steps(Net net, Shard& sharded, const Case& tested, Ranks ranks) {
  const Optimizer optimizer = tested.make(sharded.parameters());
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    net->forward(batch(ranks, rank(), step)).backward();
    optimizer->step();
  }
  sharded.gather();
}

/// A clipped step of scaled losses. That of step 1 overflows on one rank, and is left out on all.
inline void step_scaled(Net net, Shard& sharded, torch::optim::Optimizer& optimizer, GradScaler& scaler,
                        Ranks ranks, int step) {
  Tensor loss = net->forward(batch(ranks, rank(), step));
  if (step == 1 && rank() == size() - 1) loss = loss * std::numeric_limits<float>::infinity();
  scaler.scale(loss).backward();
  scaler.unscale_(optimizer);
  clip_grad_norm_(sharded.parameters(), 0.02, group());
  EXPECT_EQ(scaler.step(optimizer), step != 1);
  scaler.update();
}

/// On the device of this rank's number.
inline torch::nn::Sequential net_on_a_device() {
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(256, 512), torch::nn::GELU(), torch::nn::Linear(512, 8));
  net->to(torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(rank())));
  return net;
}

/// `run` trains inside a budget of so many bytes, and says its peak and how many pages have left: with so
/// many percent of what it takes by itself it gives the same tensors.
using BudgetedRun =
    std::function<std::vector<Tensor>(std::uint64_t bytes, std::uint64_t& peak, std::uint64_t& evictions)>;
inline constexpr std::uint64_t kPlenty = std::uint64_t{1} << 40;
/// resident_bytes of a shard in such a run: with plenty none, so that what it takes by itself is what it
/// needs.
inline std::optional<std::int64_t> resident_within(std::uint64_t budget_bytes) {
  return budget_bytes == kPlenty ? std::optional<std::int64_t>(0) : std::nullopt;
}
inline void expect_same_inside_a_budget(const BudgetedRun& run, std::uint64_t percent,
                                        const std::string& text) {
  std::uint64_t natural = 0, peak = 0, evictions = 0;
  const std::vector<Tensor> expected = run(kPlenty, natural, evictions);
  const std::uint64_t least = static_cast<std::uint64_t>(allocator_live_bytes()) + natural * percent / 100;
  const std::vector<Tensor> found = run(least, peak, evictions);
  EXPECT_LE(peak, least) << text;
  EXPECT_GT(evictions, 0U) << text;
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(torch::equal(found[i], expected[i])) << text << ", " << i;
}

/// A run of a chain of so many layers, whose input has this dtype.
inline BudgetedRun training_of_a_chain(int layers, at::ScalarType dtype, const ShardOptions& options) {
  return [=](std::uint64_t bytes, std::uint64_t& peak, std::uint64_t& evictions) {
    Budget budget(bytes, std::vector<const torch::nn::Module*>{});
    const auto before = budget.use().live_bytes;
    torch::manual_seed(3);
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i) {
      net->push_back(torch::nn::Linear(256, 256));
      net->push_back(torch::nn::GELU());
    }
    ShardOptions within = options;
    within.resident_bytes = resident_within(bytes);
    Shard sharded = shard(*net, group(), within);
    torch::optim::AdamW optimizer(sharded.parameters(), torch::optim::AdamWOptions(1e-3));
    for (int step = 0; step < 4; ++step) {
      torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank()));
      optimizer.zero_grad();
      net->forward(torch::randn({256, 256}).to(dtype)).pow(2).mean().backward();
      optimizer.step();
    }
    sharded.gather();
    peak = budget.use().peak_bytes - before;
    evictions = budget.use().evictions;
    std::vector<Tensor> found;
    for (const Tensor& parameter : net->parameters()) found.push_back(parameter.detach().clone());
    return found;
  };
}

}  // namespace reef::shard_tests
