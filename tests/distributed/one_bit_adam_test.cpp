// optim::OneBitAdam over Compression::kOneBitAdam: its warm-up is AdamW's without compression; its steps are
// the formula's; it goes on from a state; and neither is used without the other.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "distributed/through_file.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "reef/local_updates.h"
#include "reef/optimizer_state.h"
#include "shard_net.h"

namespace reef::shard_tests {
namespace {

constexpr int kWarmUp = 3;

struct Row {
  Stage stage;
  int degree = 0;
  ShardOptions options() const {
    ShardOptions all{.stage = stage, .bucket_bytes = 5000, .shard_degree = degree};
    all.compression = Compression::kOneBitAdam;
    all.compression_options = {.warmup_steps = kWarmUp};
    return all;
  }
  std::string text() const {
    return "stage " + std::to_string(static_cast<int>(stage)) + " among " + std::to_string(degree) +
           " on rank " + std::to_string(rank());
  }
};
std::vector<Row> rows() {
  std::vector<Row> all;
  for (const Stage stage : kStages) {
    all.push_back({stage});
    if (stage != Stage::kReplicate && size() == 4) all.push_back({stage, 2});
  }
  return all;
}

void backward(Net net, const Row& row, torch::optim::Optimizer& optimizer, int step) {
  optimizer.zero_grad();
  net->forward(batch(ranks_at(row.stage), rank(), step)).backward();
}
void train(const Net& net, const Row& row, torch::optim::Optimizer& optimizer, int first, int last) {
  for (int step = first; step < last; ++step) {
    backward(net, row, optimizer, step);
    optimizer.step();
  }
}

// A warm-up of three steps leaves some second moments far below their blocks' others: eps bounds their steps.
optim::OneBitAdamOptions options_of_optimizer() {
  return optim::OneBitAdamOptions(1e-2).weight_decay(0.01).eps(1e-3);
}

TEST(OneBitAdam, WarmUpIsAdamWOfExactGradients) {
  for (const Row& row : rows()) {
    Net net(7), plain_net(7);
    Shard sharded = shard(*net, group(), row.options());
    optim::OneBitAdam optimizer(sharded.parameters(), options_of_optimizer());
    train(net, row, optimizer, 0, kWarmUp);
    sharded.gather();
    Shard plain =
        shard(*plain_net, group(), {.stage = row.stage, .bucket_bytes = 5000, .shard_degree = row.degree});
    optim::AdamW adam(plain.parameters(), optim::AdamWOptions(1e-2).weight_decay(0.01).eps(1e-3));
    train(plain_net, row, adam, 0, kWarmUp);
    plain.gather();
    expect_same(*net, *plain_net, row.text());
  }
}

/// Rounded to the nearest, which torch's own is not everywhere.
Tensor root_of(const Tensor& values) {
  Tensor roots = torch::empty_like(values);
  const Tensor from = values.contiguous();
  for (std::int64_t i = 0; i < values.numel(); ++i)
    roots.mutable_data_ptr<float>()[i] = std::sqrt(from.const_data_ptr<float>()[i]);
  return roots;
}

// After it, bit for bit: of the momentum and of the second moment, which stays. Where it is 0 (planted in the
// first elements of each part) the momentum steps nothing.
TEST(OneBitAdam, StepsByTheMomentumOverAMomentThatStays) {
  for (const Row& row : rows()) {
    Net net(7);
    Shard sharded = shard(*net, group(), row.options());
    optim::OneBitAdam optimizer(sharded.parameters(), options_of_optimizer());
    train(net, row, optimizer, 0, kWarmUp);
    bool some_are_held = false;
    for (const auto& [key, state] : optimizer.state()) {
      const Tensor v = static_cast<optim::ParameterState&>(*state).find("exp_avg_sq").view({-1});
      v.slice(0, 0, 2).zero_();
    }
    for (int step = kWarmUp; step < kWarmUp + 3; ++step) {
      backward(net, row, optimizer, step);
      std::vector<Tensor> expected, moments;
      const float infinity = std::numeric_limits<float>::infinity();
      const at::NoGradGuard no_grad;
      for (const Tensor& p : sharded.parameters()) {
        const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
        Tensor v = found == optimizer.state().end()
                       ? torch::zeros_like(p)
                       : static_cast<optim::ParameterState&>(*found->second).find("exp_avg_sq").clone();
        v.masked_fill_(v == 0, infinity);
        moments.push_back(v);
        expected.push_back(p.clone());
        if (!p.grad().defined()) continue;
        const Tensor kept = p * static_cast<float>(1 - 1e-2 * 0.01);
        expected.back() = kept + (p.grad() * static_cast<float>(-1e-2)) / (root_of(v) + 1e-3F);
        some_are_held = some_are_held || (v == infinity).any().item<bool>();
      }
      optimizer.step();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const Tensor& p = sharded.parameters()[i];
        EXPECT_TRUE(torch::equal(p, expected[i]))
            << row.text() << ", " << sharded.names()[i] << ", off by "
            << (p - expected[i]).abs().max().item<float>() << ", step " << step;
        if (!p.grad().defined() || p.numel() == 0) continue;
        auto& state = static_cast<optim::ParameterState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
        EXPECT_TRUE(torch::equal(state.find("exp_avg"), p.grad())) << row.text();
        EXPECT_TRUE(torch::equal(state.find("exp_avg_sq"), moments[i])) << row.text();
      }
    }
    EXPECT_TRUE(some_are_held) << row.text();
    sharded.gather();
    Tensor own = torch::nn::utils::parameters_to_vector(parameters_of(net)).detach(), first = own.clone();
    broadcast({first}, group());
    EXPECT_TRUE(torch::equal(own, first)) << row.text() << ": ranks differ";
  }
}

// Saved in the warm-up, at its end, and after it: the same bits as without a break, from a state of all ranks
// or of rank 0. At another stage it goes on, too; that its momentum is the same
// tests/python/test_one_bit_adam.py looks at.
TEST(OneBitAdam, GoesOnFromAState) {
  const std::vector<Row> all = rows();
  for (std::size_t from = 0; from < all.size(); ++from) {
    for (const int saved_at : {1, kWarmUp, kWarmUp + 2}) {
      const Row& row = all[from];
      Net net(7);
      Shard sharded = shard(*net, group(), row.options());
      optim::OneBitAdam optimizer(sharded.parameters(), options_of_optimizer());
      train(net, row, optimizer, 0, saved_at);
      const StateDict module = sharded.full_state_dict();
      const OptimizerState whole = through_file(sharded.full_optimizer_state(optimizer));
      train(net, row, optimizer, saved_at, kWarmUp + 4);
      sharded.gather();
      for (const bool on_rank_0 : {false, true}) {
        Net resumed_net(9);
        Shard resumed = shard(*resumed_net, group(), row.options());
        optim::OneBitAdam own(resumed.parameters(), options_of_optimizer());
        resumed.load_state_dict({module});
        std::vector<OptimizerState> given = {whole};
        if (on_rank_0 && rank() > 0) given.clear();
        resumed.load_optimizer_state(own, given);
        train(resumed_net, row, own, saved_at, kWarmUp + 4);
        resumed.gather();
        expect_same(*resumed_net, *net, row.text() + ", saved at " + std::to_string(saved_at));
      }
      const Row& other = all[(from + 1) % all.size()];
      Net other_net(9);
      Shard moved = shard(*other_net, group(), other.options());
      optim::OneBitAdam own(moved.parameters(), options_of_optimizer());
      moved.load_state_dict({module});
      moved.load_optimizer_state(own, {whole});
      train(other_net, other, own, saved_at, kWarmUp + 4);
      moved.gather();
      EXPECT_EQ(moved.communication().numbers.front().second.toInt(), kWarmUp + 4) << other.text();
      for (const Tensor& parameter : parameters_of(other_net))
        EXPECT_TRUE(parameter.isfinite().all().item<bool>()) << other.text();
    }
  }
}

void refuses(const std::function<void()>& what, const std::string& text) {
  try {
    what();
    ADD_FAILURE() << "nothing was thrown; expected: " << text;
  } catch (const ConfigError& error) {
    EXPECT_NE(message_of(error).find(text), std::string::npos) << message_of(error);
  }
}

TEST(OneBitAdam, NeitherIsUsedWithoutTheOther) {
  for (const Row& row : rows()) {
    Net net(7), plain_net(7);
    Shard plain = shard(*plain_net, group(), {.stage = row.stage});
    refuses([&] { optim::OneBitAdam of_plain(plain.parameters()); }, "is of no shard with compression");
    refuses([&] { optim::OneBitAdam alone({torch::zeros({3})}); }, "is of no shard with compression");
    Shard sharded = shard(*net, group(), row.options());
    refuses([&] { optim::AdamW adam(sharded.parameters()); }, "make an optim::OneBitAdam");
    refuses([&] { optim::SGD sgd(sharded.parameters()); }, "make an optim::OneBitAdam");
    const auto with = [&](const optim::OneBitAdamOptions& options) {
      return [&sharded, options] { optim::OneBitAdam made(sharded.parameters(), options); };
    };
    refuses(with(optim::OneBitAdamOptions().betas({0.95, 0.999})), "give both the same");
    refuses(with(optim::OneBitAdamOptions().state(optim::StateFormat::kInt8)), "give float32");
    refuses(with(optim::OneBitAdamOptions().amsgrad(true)), "amsgrad");
    refuses([&] { clip_grad_norm_(sharded.parameters(), 1.0, group()); }, "one_bit_adam");
  }
}

// An optimizer that nobody can ask is found out by the exchange: on all ranks, and nothing is lost.
TEST(OneBitAdam, AMomentumIsGivenToItsOptimizerOnly) {
  for (const Row& row : rows()) {
    Net net(7);
    Shard sharded = shard(*net, group(), row.options());
    torch::optim::AdamW torchs(sharded.parameters(), torch::optim::AdamWOptions(1e-2));
    train(net, row, torchs, 0, kWarmUp);
    refuses([&] { backward(net, row, torchs, kWarmUp); }, "would be a momentum");
    optim::OneBitAdam optimizer(sharded.parameters(), options_of_optimizer());
    backward(net, row, optimizer, kWarmUp);
    EXPECT_EQ(sharded.communication().numbers.front().second.toInt(), kWarmUp + 1) << row.text();
  }
}

TEST(OneBitAdam, APassAddsToNoOther) {
  for (const Row& row : rows()) {
    for (const int steps : {1, kWarmUp + 1}) {
      Net net(7);
      Shard sharded = shard(*net, group(), row.options());
      optim::OneBitAdam optimizer(sharded.parameters(), options_of_optimizer());
      train(net, row, optimizer, 0, steps);
      refuses([&] { net->forward(batch(ranks_at(row.stage), rank(), 5)).backward(); },
              "has a gradient of an earlier pass");
      train(net, row, optimizer, steps, steps + 1);  // cleared
      optimizer.zero_grad();
      {
        const Shard::NoSync no_sync(sharded);
        net->forward(batch(ranks_at(row.stage), rank(), 6)).backward();
      }
      net->forward(batch(ranks_at(row.stage), rank(), 7)).backward();
      optimizer.step();
      EXPECT_EQ(sharded.communication().numbers.front().second.toInt(), steps + 2) << row.text();
    }
  }
}

TEST(OneBitAdam, OptionsThatCannotBeAreRefused) {
  Net net(7);
  const auto refused = [&](const std::string& text, const std::function<void(ShardOptions&)>& change) {
    ShardOptions options = Row{Stage::kReplicate}.options();
    change(options);
    refuses([&] { shard(*net, group(), options); }, text);
  };
  refused("without warmup_steps", [](ShardOptions& all) { all.compression_options = {}; });
  refused("warmup_steps 0", [](ShardOptions& all) { all.compression_options.warmup_steps = 0; });
  refused("beta1 1:", [](ShardOptions& all) { all.compression_options.beta1 = 1; });
  refused("reduction kSum", [](ShardOptions& all) { all.reduction = Reduction::kSum; });
  Shard sharded = shard(*net, group(), Row{Stage::kReplicate}.options());
  refuses([&] { Shard::LocalSums local(sharded); }, "one_bit_adam");
  net->to(at::kDouble);
  Net wide(7);
  wide->to(at::kDouble);
  refuses([&] { shard(*wide, group(), Row{Stage::kReplicate}.options()); }, "is not float32");
}

}  // namespace
}  // namespace reef::shard_tests
