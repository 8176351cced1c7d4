// optim::OneBitAdam together with what else a shard can do: uneven numbers of batches, a delayed update,
// refresh(), offload and master weights. Each is, bit for bit, what one process does in plain tensors; what
// would make the momentum that ranks remember another one is refused.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "one_bit_adam_alone.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "reef/optimizer_state.h"
#include "reef/shard_layout.h"
#include "shard_net.h"
#include "support/config_error.h"

namespace reef::shard_tests {
namespace {

using test::config_error;

constexpr int kWarmUp = 2, kLast = 6;
constexpr std::int64_t kBucketBytes = 12000;
constexpr double kRate = 1e-2, kDecay = 0.01, kEps = 1e-3, kBeta1 = 0.8;

enum class With { kNothing, kDelayedUpdate, kJoin, kRefresh };

struct Row {
  Stage stage = Stage::kReplicate;
  int degree = 0;
  bool offload = false, masters = false;
  With with = With::kNothing;

  ShardOptions options() const {
    ShardOptions all{
        .stage = stage, .bucket_bytes = kBucketBytes, .shard_degree = degree, .offload = offload};
    all.compression = Compression::kOneBitAdam;
    all.compression_options = {.warmup_steps = kWarmUp, .beta1 = kBeta1};
    if (masters) all.mixed_precision = MixedPrecision{};
    return all;
  }
  bool is_divided() const { return stage != Stage::kReplicate; }
  /// The shard gives parameters() memory of their own.
  bool has_parts() const { return is_divided() || offload || masters; }
  /// Returns how many batches a rank has. Some have fewer than the warm-up has steps, or none.
  int batches(int of) const {
    constexpr int kUneven[] = {kLast, 1, 0, 4};
    return with == With::kJoin ? kUneven[of] : kLast;
  }
  std::string text() const {
    constexpr const char* kNames[] = {"", ", delayed", ", joined", ", refreshed"};
    return "stage " + std::to_string(static_cast<int>(stage)) + " among " + std::to_string(degree) +
           (offload ? ", offloaded" : "") + (masters ? ", with masters" : "") +
           kNames[static_cast<int>(with)] + " on rank " + std::to_string(rank());
  }
};

/// With more than two ranks masters are offloaded, and nothing else is.
std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Stage stage : kStages) {
    for (const int degree : {0, 2}) {
      if (degree != 0 && (stage == Stage::kReplicate || size() != 4)) continue;
      for (const bool offload : {false, true}) {
        for (const bool masters : {false, true}) {
          if (size() > 2 && offload != masters) continue;
          for (const With with : {With::kNothing, With::kDelayedUpdate, With::kJoin, With::kRefresh}) {
            const bool can_delay = offload && stage != Stage::kParameters;
            if (with != With::kDelayedUpdate || can_delay)
              all.push_back({stage, degree, offload, masters, with});
          }
        }
      }
    }
  }
  return all;
}

optim::OneBitAdamOptions options_of_optimizer() {
  return optim::OneBitAdamOptions(kRate).weight_decay(kDecay).eps(kEps).betas({kBeta1, 0.999});
}

Net net_of(const Row& row) {
  Net net(7);
  if (row.masters) net->scale.set_data(net->scale.to(at::kBFloat16));
  return net;
}

/// Parameters that require a gradient, each once, with the first of its names.
std::vector<std::pair<std::string, Tensor>> trained(const Net& net) {
  std::vector<std::pair<std::string, Tensor>> once;
  std::unordered_set<const void*> seen;
  for (const auto& item : net->named_parameters()) {
    if (item.value().requires_grad() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      once.emplace_back(item.key(), item.value());
  }
  return once;
}

/// Rounded to the nearest, which torch's own is not everywhere.
Tensor root_of(const Tensor& values) {
  Tensor roots = torch::empty_like(values);
  for (std::int64_t i = 0; i < values.numel(); ++i)
    roots.mutable_data_ptr<float>()[i] = std::sqrt(values.const_data_ptr<float>()[i]);
  return roots;
}

/// Plays all ranks in one process: keeps float32 masters, and makes a module of them for each step.
class Alone {
 public:
  explicit Alone(const Row& row) : net(net_of(row)), row_(row) {
    for (const auto& [name, parameter] : trained(net)) {
      names.push_back(name);
      masters.push_back(parameter.detach().clone().set_requires_grad(true));
    }
    if (row.masters) net->to(at::kBFloat16);
    seen_ = copies_of_masters();
    std::vector<ShardItem> items;  // backward comes to the last first
    for (auto it = masters.rbegin(); it != masters.rend(); ++it) items.push_back({it->numel(), 4, 0});
    const int degree = row.degree != 0 ? row.degree : size();
    layout_ = plan_shards(items, degree, kBucketBytes);
    for (const ShardBucket& bucket : layout_.buckets) {
      OneBitAdamAlone& made =
          exchanges_.emplace_back(OneBitAdamAlone{size(), degree, row.is_divided(), kWarmUp, kBeta1});
      for (const ShardPiece& piece : bucket.items)
        made.places.push_back({piece.offset, {piece.elements}, {1}, masters.size() - 1 - piece.item});
    }
    adam_ = std::make_unique<optim::AdamW>(
        masters, optim::AdamWOptions(kRate).weight_decay(kDecay).eps(kEps).betas({kBeta1, 0.999}));
  }

  void step(int number) {
    make_module(seen_);
    if (row_.with == With::kDelayedUpdate) seen_ = copies_of_masters();
    const std::vector<Tensor> given = exchanged(gradients_of_ranks(number));
    adam_->zero_grad();
    for (std::size_t i = 0; i < masters.size(); ++i) {
      if (given[i].defined() && number < kWarmUp) masters[i].mutable_grad() = given[i];
      if (given[i].defined() && number >= kWarmUp) step_by_momentum(i, given[i]);
    }
    adam_->step();
    ++used_;
    if (row_.with != With::kDelayedUpdate) seen_ = copies_of_masters();
  }

  /// Makes the module of the newest masters.
  void make_module() { make_module(copies_of_masters()); }

  std::vector<std::string> names;
  std::vector<Tensor> masters;
  Net net;

 private:
  std::vector<Tensor> copies_of_masters() const {
    std::vector<Tensor> copies;
    for (const Tensor& master : masters) copies.push_back(master.detach().clone());
    return copies;
  }
  void make_module(const std::vector<Tensor>& of) {
    const torch::NoGradGuard no_grad;
    const auto parameters = trained(net);
    for (std::size_t i = 0; i < of.size(); ++i) parameters[i].second.copy_(of[i]);
  }
  // [rank][parameter]; undefined, where a rank has none.
  std::vector<std::vector<Tensor>> gradients_of_ranks(int number) {
    std::vector<std::vector<Tensor>> all(static_cast<std::size_t>(size()));
    for (int of = 0; of < size(); ++of) {
      const bool has_batch = number < row_.batches(of);
      if (has_batch) net->forward(batch(ranks_at(row_.stage), of, number)).backward();
      for (const auto& [name, parameter] : trained(net)) {
        const Tensor gradient = parameter.grad();
        all[static_cast<std::size_t>(of)].push_back(gradient.defined() ? gradient.to(at::kFloat) : Tensor());
        parameter.mutable_grad().reset();
      }
    }
    return all;
  }
  // What comes of them; undefined, where no rank has a gradient.
  std::vector<Tensor> exchanged(const std::vector<std::vector<Tensor>>& gradients) {
    std::vector<Tensor> given(masters.size());
    for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
      OneBitAdamAlone& exchange = exchanges_[bucket];
      const OneBitAdamAlone before = exchange;
      std::vector<Tensor> flats;
      for (const auto& of_rank : gradients) {
        Tensor& flat = flats.emplace_back(torch::zeros({layout_.elements(bucket)}));
        for (const FlatPlace& place : exchange.places) {
          if (of_rank[place.item].defined()) place.of(flat).copy_(of_rank[place.item].flatten());
        }
      }
      const Tensor result = exchange.step(flats, used_);
      for (const FlatPlace& place : exchange.places) {
        const auto has_gradient = [&](const auto& of_rank) { return of_rank[place.item].defined(); };
        if (std::any_of(gradients.begin(), gradients.end(), has_gradient)) {
          given[place.item] = place.of(result).view_as(masters[place.item]).clone();
        } else {
          exchange.leave_out(before, place.offset, masters[place.item].numel());
        }
      }
    }
    return given;
  }
  void step_by_momentum(std::size_t i, const Tensor& momentum) {
    const torch::NoGradGuard no_grad;
    const auto found = adam_->state().find(masters[i].unsafeGetTensorImpl());
    const Tensor before = found == adam_->state().end()
                              ? torch::zeros_like(masters[i])
                              : static_cast<optim::ParameterState&>(*found->second).find("exp_avg_sq");
    const Tensor second = before.masked_fill(before == 0, std::numeric_limits<float>::infinity());
    const Tensor kept = masters[i] * static_cast<float>(1 - kRate * kDecay);
    masters[i].copy_(kept +
                     (momentum * static_cast<float>(-kRate)) / (root_of(second) + static_cast<float>(kEps)));
  }

  const Row row_;
  ShardLayout layout_;
  std::vector<OneBitAdamAlone> exchanges_;
  std::unique_ptr<optim::AdamW> adam_;
  std::vector<Tensor> seen_;  ///< what the next pass computes with
  int used_ = 0;
};

/// This rank's run of the same.
class OneRank {
 public:
  explicit OneRank(const Row& row)
      : net(net_of(row)), row_(row), sharded(shard(*net, group(), row.options())) {
    make_optimizer();
    if (row.with == With::kDelayedUpdate) delayed.emplace(*optimizer, sharded);
  }

  void backward(int number) {
    if (delayed) {
      delayed->zero_grad();
    } else {
      optimizer->zero_grad();
    }
    net->forward(batch(ranks_at(row_.stage), rank(), number)).backward();
  }
  void step() {
    if (delayed) {
      delayed->step();
    } else {
      optimizer->step();
    }
  }
  void train(int first, int last) {
    for (int number = first; number < last; ++number) {
      backward(number);
      step();
    }
  }
  void make_optimizer() {
    optimizer = std::make_unique<optim::OneBitAdam>(sharded.parameters(), options_of_optimizer());
  }
  /// With the optimizer's states as the shard has them, or as they lie on this rank.
  void refresh(bool by_the_shard) {
    const OptimizerState whole = sharded.full_optimizer_state(*optimizer);
    const OptimizerState own = optimizer_state(*optimizer);
    sharded.refresh(*net);
    if (!row_.has_parts()) return;  // the optimizer is of the same parameters
    make_optimizer();
    if (by_the_shard) {
      sharded.load_optimizer_state(*optimizer, {whole});
    } else {
      load_optimizer_state(*optimizer, own);
    }
  }

  Net net;

 private:
  const Row row_;

 public:
  Shard sharded;
  std::unique_ptr<optim::OneBitAdam> optimizer;
  std::optional<DelayedUpdate> delayed;
};

TEST(OneBitAdamTogether, IsWhatOneProcessDoes) {
  for (const Row& row : rows()) {
    Alone alone(row);
    for (int number = 0; number < kLast; ++number) alone.step(number);
    alone.make_module();

    OneRank run(row);
    for (int number = 0; number < row.batches(rank()); ++number) {
      run.train(number, number + 1);
      if (row.with == With::kRefresh && number != 2) run.refresh(/*by_the_shard=*/number % 2 == 0);
    }
    int joined = 0;
    if (row.with == With::kJoin) {
      run.sharded.join([&] {
        run.step();
        ++joined;
      });
      EXPECT_EQ(joined, kLast - row.batches(rank())) << row.text();
    }
    if (run.delayed) run.delayed->finish();
    run.sharded.gather();
    expect_same(*run.net, *alone.net, row.text());
    const StateDict whole = run.sharded.full_state_dict();
    for (std::size_t i = 0; i < alone.masters.size(); ++i) {
      const Tensor& expected = alone.masters[i];
      const Tensor found = whole.at(alone.names[i]);
      EXPECT_TRUE(torch::equal(found, expected)) << row.text() << ": " << alone.names[i] << " is off by "
                                                 << (found - expected).abs().max().item<float>();
    }
    const auto numbers = run.sharded.communication().numbers;
    EXPECT_EQ(numbers.at(0).second.toInt(), kLast) << row.text();
    EXPECT_EQ(numbers.at(1).second.toInt(), kLast - kWarmUp) << row.text();
  }
}

/// Numbers of steps that end in each of the two phases.
const int kPhases[] = {1, kWarmUp + 1};

std::vector<Tensor> values_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> copies;
  for (const Tensor& parameter : parameters) copies.push_back(parameter.detach().clone());
  return copies;
}

// Gradients are changed by what torch itself offers, and by hand. Where ranks have parts, torch's norm of
// them is refused before.
TEST(OneBitAdamTogether, AGradientThatHasBeenChangedIsNotStepped) {
  using torch::nn::utils::clip_grad_norm_;
  using torch::nn::utils::clip_grad_value_;
  using Parameters = const std::vector<Tensor>&;
  const std::vector<std::pair<const char*, std::function<void(Parameters)>>> changes = {
      {"norm", [](Parameters all) { clip_grad_norm_(all, 1e-3); }},
      {"value", [](Parameters all) { clip_grad_value_(all, 1e-6); }},
      {"a factor",
       [](Parameters all) {
         for (const Tensor& p : all) p.mutable_grad().mul_(-1);
       }},
      {"another tensor", [](Parameters all) {
         for (const Tensor& p : all) p.mutable_grad() = p.grad() * 2;
       }}};
  for (const Row& row : rows()) {
    if (row.with != With::kNothing || row.offload != row.masters) continue;
    for (const int steps : kPhases) {
      OneRank run(row);
      run.train(0, steps);
      for (const auto& [name, change] : changes) {
        std::vector<Tensor> with_gradient;
        run.backward(steps);
        for (const Tensor& p : run.sharded.parameters()) {
          if (p.grad().defined() && p.numel() > 0) with_gradient.push_back(p);
        }
        ASSERT_FALSE(with_gradient.empty()) << row.text();
        const std::vector<Tensor> before = values_of(run.sharded.parameters());
        try {
          change(with_gradient);
        } catch (const c10::Error& refused) {
          EXPECT_TRUE(row.is_divided() && size() > 1 && name == std::string("norm")) << row.text();
          EXPECT_NE(message_of(refused).find("clip_grad_norm_"), std::string::npos) << message_of(refused);
          continue;
        }
        const std::string said = config_error([&] { run.step(); });
        EXPECT_NE(said.find("change no gradient"), std::string::npos)
            << row.text() << ", " << name << ": " << said;
        const std::vector<Tensor> after = values_of(run.sharded.parameters());
        for (std::size_t i = 0; i < after.size(); ++i)
          EXPECT_TRUE(torch::equal(after[i], before[i])) << row.text() << ", " << name;
      }
      // The same bits are the same gradient, wherever they lie.
      run.backward(steps);
      for (const Tensor& p : run.sharded.parameters()) {
        if (p.grad().defined()) p.mutable_grad() = p.grad().clone();
      }
      run.step();
    }
  }
}

// Sums of this rank alone are no gradient of the shard's. Where parts have gradients, none of them shows.
TEST(OneBitAdamTogether, SumsOfNoSyncAreNotStepped) {
  for (const int steps : kPhases) {
    OneRank run({Stage::kReplicate});
    run.train(0, steps);
    run.optimizer->zero_grad();
    const Shard::NoSync no_sync(run.sharded);
    run.net->forward(batch(Ranks::kDiffer, rank(), steps)).backward();
    EXPECT_NE(config_error([&] { run.step(); }).find("the last pass that was reduced"), std::string::npos);
  }
}

// Nobody can be told while the next pass runs, so the next call throws the error.
TEST(OneBitAdamTogether, ADelayedStepIsRefusedAsAnother) {
  OneRank run({Stage::kGradients, 0, /*offload=*/true, false, With::kDelayedUpdate});
  run.train(0, kWarmUp + 1);
  run.backward(kWarmUp + 1);
  for (const Tensor& p : run.sharded.parameters()) {
    if (p.grad().defined()) p.mutable_grad().mul_(0.5);
  }
  run.step();
  EXPECT_NE(config_error([&] { run.delayed->finish(); }).find("change no gradient"), std::string::npos);
  EXPECT_NE(config_error([&] { run.sharded.join([] {}); }).find("beside a DelayedUpdate"), std::string::npos);
  EXPECT_NE(config_error([&] { run.refresh(true); }).find("beside a DelayedUpdate"), std::string::npos);
}

// By an optimizer that knows no second moment every parameter would stand still, and say nothing.
TEST(OneBitAdamTogether, AMomentumIsNotSteppedWithoutSecondMoments) {
  for (const Row& row : rows()) {
    if (row.with != With::kRefresh || row.offload != row.masters) continue;
    OneRank run(row);
    run.train(0, kWarmUp + 1);
    const OptimizerState states = run.sharded.full_optimizer_state(*run.optimizer);
    run.sharded.refresh(*run.net);
    run.make_optimizer();
    const std::vector<Tensor> before = values_of(run.sharded.parameters());
    run.backward(kWarmUp + 1);
    const std::string said = config_error([&] { run.step(); });
    EXPECT_NE(said.find("no second moment of any parameter"), std::string::npos) << row.text() << said;
    const std::vector<Tensor> after = values_of(run.sharded.parameters());
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_TRUE(torch::equal(after[i], before[i])) << row.text();
    run.sharded.load_optimizer_state(*run.optimizer, {states});
    run.train(kWarmUp + 1, kLast);
  }
}

// Gradients of replicas stay through refresh(), and are what they were.
TEST(OneBitAdamTogether, RefreshBetweenAPassAndItsStep) {
  for (const int steps : kPhases) {
    OneRank run({Stage::kReplicate}), expected({Stage::kReplicate});
    run.train(0, steps);
    expected.train(0, steps + 1);
    run.backward(steps);
    run.sharded.refresh(*run.net);
    run.step();
    expect_same(*run.net, *expected.net, "after " + std::to_string(steps) + " steps");
  }
}

TEST(OneBitAdamTogether, SumsOf16BitsAreRefused) {
  for (const Row& row : rows()) {
    if (row.with != With::kNothing || !row.masters) continue;
    const auto refused = [&](const MixedPrecision& mixed) {
      Net net = net_of(row);
      ShardOptions options = row.options();
      options.mixed_precision = mixed;
      return config_error([&] { shard(*net, group(), options); });
    };
    EXPECT_NE(refused({at::kBFloat16, at::kBFloat16}).find("give MixedPrecision with sums of Float"),
              std::string::npos)
        << row.text();
    EXPECT_NE(refused({at::kHalf, at::kFloat}).find("is of Half, and a compression"), std::string::npos)
        << row.text();
  }
}

}  // namespace
}  // namespace reef::shard_tests
