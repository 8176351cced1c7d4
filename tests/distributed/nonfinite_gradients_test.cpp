// NaN and infinities in gradients that a compression would spread or hide: all ranks are told whose they are,
// and the pass leaves no trace.
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

constexpr int kWarmUp = 2;
constexpr float kValues[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                             -std::numeric_limits<float>::infinity()};
/// The net's parameters, in its order, that all ranks use in even steps.
const std::vector<std::string> kUsed = {"even",      "tied",    "norm.weight", "norm.bias",
                                        "up.weight", "up.bias", "down.weight", "down.bias"};

struct Row {
  Compression method;
  Stage stage = Stage::kReplicate;
  int degree = 0;
  ShardOptions options() const {
    const CompressionOptions all{
        .density = 0.1, .bits = 4, .rank = 2, .seed = 3, .max_norm = 0.5, .warmup_steps = kWarmUp};
    return {.stage = stage,
            .bucket_bytes = 5000,
            .compression = method,
            .compression_options = options_taken(method, all),
            .shard_degree = degree};
  }
  std::string text() const {
    return std::string(name_of(method)) + ", stage " + std::to_string(static_cast<int>(stage)) + " among " +
           std::to_string(degree) + " on rank " + std::to_string(rank());
  }
};
std::vector<Row> rows_of(Compression method) {
  std::vector<Row> all;
  for (const Stage stage : kStages) {
    all.push_back({method, stage});
    if (stage != Stage::kReplicate && size() == 4) all.push_back({method, stage, 2});
  }
  return all;
}
std::vector<Row> rows() {
  std::vector<Row> all;
  for (auto method = Compression::kBFloat16; method <= Compression::kOneBitAdam;
       method = static_cast<Compression>(static_cast<int>(method) + 1)) {
    for (const Row& row : rows_of(method)) all.push_back(row);
  }
  return all;
}

/// Puts a value into the last elements of a parameter's gradient, in the passes in which it is told to.
class Spoiled {
 public:
  struct What {
    std::string parameter;
    float value = kValues[0];
    std::int64_t elements = 1;
  };
  explicit Spoiled(const Net& net) {
    for (const auto& item : net->named_parameters()) {
      if (item.key() == "tokens.weight" || !item.value().requires_grad()) continue;
      item.value().register_hook([this, name = item.key()](const Tensor& gradient) {
        const auto found = now.find(name);
        if (found == now.end()) return gradient;
        Tensor spoiled = gradient.clone(at::MemoryFormat::Contiguous);
        spoiled.view({-1}).slice(0, -found->second.elements).fill_(found->second.value);
        return spoiled;
      });
    }
  }
  void only(const What& what) { now = {{what.parameter, what}}; }
  std::map<std::string, What> now;
};

Optimizer optimizer_of(const Row& row, const Shard& sharded) {
  if (row.method == Compression::kOneBitAdam)
    return std::make_shared<optim::OneBitAdam>(sharded.parameters(), optim::OneBitAdamOptions(1e-2));
  return std::make_shared<torch::optim::SGD>(sharded.parameters(), torch::optim::SGDOptions(0.1));
}
void backward(Net net, torch::optim::Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  net->forward(batch(Ranks::kAlike, rank(), step)).backward();
}
void clear(torch::optim::Optimizer& optimizer, Net net, Shard& sharded) {
  optimizer.zero_grad();
  net->zero_grad();
  sharded.clear_gradients();
}

std::string text_of(const std::vector<NonFiniteElements>& all) {
  std::string text;
  for (const NonFiniteElements& each : all)
    text += each.parameter + " on " + (each.rank ? std::to_string(*each.rank) : "none") + ": " +
            std::to_string(each.elements) + "; ";
  return text;
}
void expect_void(const Shard& sharded, const std::string& text) {
  int defined = 0;
  for (const Tensor& parameter : sharded.parameters()) {
    if (!parameter.grad().defined()) continue;
    ++defined;
    EXPECT_TRUE(parameter.grad().isnan().all().item<bool>()) << text;
  }
  EXPECT_GE(defined, 8) << text;
}
std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> all;
  for (const Tensor& each : tensors) all.push_back(each.detach().clone());
  return all;
}
void expect_equal(const std::vector<Tensor>& found, const std::vector<Tensor>& expected,
                  const std::string& text) {
  for (std::size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(torch::equal(found[i], expected[i])) << text << ", " << i;
}
/// Returns all that this rank's exchange remembers, by name.
std::map<std::string, Tensor> remembered(const Shard& sharded) {
  const OptimizerState::Communication own = sharded.communication();
  std::map<std::string, Tensor> all;
  for (const auto& [name, number] : own.numbers) all["number " + name] = torch::tensor(number.toInt());
  for (const auto& [name, values] : own.of_ranks.front().second) {
    for (const auto& [key, value] : values) all[name + " " + key] = value.toTensor().clone();
  }
  return all;
}
void expect_equal(const std::map<std::string, Tensor>& found, const std::map<std::string, Tensor>& expected,
                  const std::string& text) {
  EXPECT_EQ(found.size(), expected.size()) << text;
  for (const auto& [name, tensor] : expected) {
    const auto one = found.find(name);
    ASSERT_NE(one, found.end()) << text << ", " << name;
    EXPECT_TRUE(torch::equal(one->second, tensor)) << text << ", " << name;
  }
}

/// Every value in every parameter on every rank, in an order that mixes them.
struct Turn {
  int number = 0;
  int count() const { return 3 * size() * static_cast<int>(kUsed.size()); }
  int of_rank() const { return place() / 3 % size(); }
  Spoiled::What what() const {
    return {kUsed[static_cast<std::size_t>(place() / 3 / size())], kValues[place() % 3],
            1 + static_cast<std::int64_t>(number % 3)};
  }
  int place() const { return number * 37 % count(); }
};

// Before each step of training there is a pass in which one rank's gradient is not finite: what is trained is
// what is trained without these, bit for bit, and what is held back stays as it was.
TEST(NonFiniteGradients, LeaveNoTrace) {
  constexpr int kFirstOfMomentum = kWarmUp;
  Turn turn;
  std::set<int> places;
  for (const Row& row : rows()) {
    Net expected(7), net(7);
    {
      Shard sharded = shard(*expected, group(), row.options());
      const Optimizer optimizer = optimizer_of(row, sharded);
      for (int step = 0; step < kSteps; ++step) {
        backward(expected, *optimizer, step);
        optimizer->step();
      }
      sharded.gather();
    }
    Spoiled spoiled(net);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = optimizer_of(row, sharded);
    for (int step = 0; step < kSteps; ++step, ++turn.number) {
      const std::string text = row.text() + ", step " + std::to_string(step) + ", " + turn.what().parameter +
                               " on rank " + std::to_string(turn.of_rank());
      const auto before = remembered(sharded);
      const std::vector<Tensor> parameters = copies(sharded.parameters());
      if (rank() == turn.of_rank()) spoiled.only(turn.what());
      backward(net, *optimizer, 10 + 2 * step);
      spoiled.now.clear();
      EXPECT_EQ(text_of(sharded.nonfinite_gradients()),
                text_of({{turn.what().parameter, turn.of_rank(), turn.what().elements}}))
          << text;
      expect_void(sharded, text);
      // There, slices of a momentum have become whole.
      if (row.method != Compression::kOneBitAdam || step != kFirstOfMomentum)
        expect_equal(remembered(sharded), before, text);
      expect_equal(copies(sharded.parameters()), parameters, text);
      places.insert(turn.place());

      clear(*optimizer, net, sharded);
      backward(net, *optimizer, step);
      EXPECT_TRUE(sharded.nonfinite_gradients().empty()) << text;
      optimizer->step();
    }
    sharded.gather();
    expect_same(*net, *expected, row.text());
  }
  EXPECT_EQ(places.size(), static_cast<std::size_t>(turn.count()));
}

// In the module's order and that of ranks; what a pass in no_sync has added up is looked at, too.
TEST(NonFiniteGradients, AreAllNamedOnAllRanks) {
  for (const Row& row : rows_of(Compression::kTopK)) {
    Net net(7);
    Spoiled spoiled(net);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = optimizer_of(row, sharded);
    optimizer->zero_grad();
    {
      const Shard::NoSync pause(sharded);
      if (rank() == 0) spoiled.now["up.bias"] = {"up.bias", kValues[1], 5};
      net->forward(batch(Ranks::kAlike, rank(), 0)).backward();
    }
    spoiled.now.clear();
    spoiled.now["down.weight"] = {"down.weight", kValues[2], 20 + rank()};
    if (rank() == size() - 1) spoiled.now["tied"] = {"tied", kValues[0], 300};
    net->forward(batch(Ranks::kAlike, rank(), 2)).backward();
    std::vector<NonFiniteElements> expected = {{"tied", size() - 1, 300}, {"up.bias", 0, 5}};
    for (int of = 0; of < size(); ++of) expected.push_back({"down.weight", of, 20 + of});
    EXPECT_EQ(text_of(sharded.nonfinite_gradients()), text_of(expected)) << row.text();
    expect_void(sharded, row.text());
  }
}

// Who looks at gradients sees it on every rank, in every parameter: optimizers of Reef refuse, and a scaler
// leaves the step out.
TEST(NonFiniteGradients, AreSeenByOptimizersAndScalers) {
  Turn turn;
  for (const Row& row : rows()) {
    Net net(7);
    Spoiled spoiled(net);
    Shard sharded = shard(*net, group(), row.options());
    const bool has_momentum = row.method == Compression::kOneBitAdam;
    const Optimizer optimizer =
        has_momentum ? optimizer_of(row, sharded)
                     : std::make_shared<optim::AdamW>(sharded.parameters(), optim::AdamWOptions(1e-2));
    GradScaler scaler({.init_scale = 4}, group());
    for (int step = 0; step < 2; ++step, ++turn.number) {
      const std::string text = row.text() + ", step " + std::to_string(step);
      backward(net, *optimizer, step);
      optimizer->step();
      const std::vector<Tensor> before = copies(sharded.parameters());
      if (rank() == turn.of_rank()) spoiled.only(turn.what());
      backward(net, *optimizer, 2 * step);
      spoiled.now.clear();
      std::int64_t elements = 0;
      for (const Tensor& parameter : sharded.parameters())
        elements += parameter.grad().defined() ? parameter.numel() : 0;
      bool refused = false;
      try {
        optimizer->step();
      } catch (const NonFiniteGradient&) {
        refused = true;
      }
      EXPECT_EQ(refused, elements > 0) << text;
      if (!has_momentum) {
        EXPECT_FALSE(scaler.step(*optimizer)) << text;
        scaler.update();
        EXPECT_EQ(scaler.get_scale(), 4 / std::pow(2, step + 1)) << text;
      }
      expect_equal(copies(sharded.parameters()), before, text);
      clear(*optimizer, net, sharded);
    }
  }
}

// Finite gradients whose sum, or code, is not are no rank's fault; the pass is void all the same.
TEST(NonFiniteGradients, OfNoRankAreNamed) {
  if (size() == 1) return;
  const auto overflows = [](Compression method, float gradient, const std::string& text) {
    for (const Row& row : rows_of(method)) {
      torch::manual_seed(7);
      torch::nn::Linear layer(40, 30);
      ShardOptions options = row.options();
      options.reduction = Reduction::kSum;
      if (method == Compression::kTopK) options.compression_options = {.density = 1};
      Shard sharded = shard(*layer, group(), options);
      torch::optim::SGD optimizer(sharded.parameters(), torch::optim::SGDOptions(0.1));
      for (const float factor : {1.F, gradient, 1.F}) {
        optimizer.zero_grad();
        const auto before = remembered(sharded);
        (layer->weight.sum() * factor + layer->bias.sum()).backward();
        const std::string expected = factor == 1 ? "" : text_of({{"weight", std::nullopt, 1200}});
        EXPECT_EQ(text_of(sharded.nonfinite_gradients()), expected) << row.text() << text;
        if (factor != 1) expect_equal(remembered(sharded), before, row.text() + text);
      }
    }
  };
  overflows(Compression::kFloat16, 1e5F, ", a code");
  overflows(Compression::kTopK, 3e38F, ", a sum");
}

// A rank without a batch is told as the others are.
TEST(NonFiniteGradients, OfOthersBatchesAreNamedInJoin) {
  for (const Row& row : rows_of(Compression::kSign)) {
    Net net(7);
    Spoiled spoiled(net);
    Shard sharded = shard(*net, group(), row.options());
    const Optimizer optimizer = optimizer_of(row, sharded);
    if (rank() == 0) {
      spoiled.only({"up.weight", kValues[1], 2});
      backward(net, *optimizer, 0);
      EXPECT_EQ(text_of(sharded.nonfinite_gradients()), text_of({{"up.weight", 0, 2}})) << row.text();
    }
    int passes = 0;
    sharded.join([&] {
      ++passes;
      EXPECT_EQ(text_of(sharded.nonfinite_gradients()), text_of({{"up.weight", 0, 2}})) << row.text();
      expect_void(sharded, row.text());
    });
    EXPECT_EQ(passes, rank() == 0 ? 0 : 1) << row.text();
  }
}

TEST(NonFiniteGradients, AreAskedForWhereACompressionWouldHideThem) {
  Net net(7);
  const Shard sharded = shard(*net, group());
  try {
    sharded.nonfinite_gradients();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find("on a shard without a compression"), std::string::npos);
  }
}

}  // namespace
}  // namespace reef::shard_tests
