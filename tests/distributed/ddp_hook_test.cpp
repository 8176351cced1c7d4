// DdpHook by itself, without the wrapper of torch's Python: gradients that come in buckets of any size and
// order become what reef::shard makes of them at Stage::kReplicate, bit for bit, and so does what is held
// back.
#include "reef/ddp_hook.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "reef/error.h"
#include "shard_net.h"
#include "support/config_error.h"

namespace reef::shard_tests {
namespace {

using Communication = OptimizerState::Communication;
using test::config_error;

struct Method {
  Compression compression;
  CompressionOptions options = {};
};
const std::vector<Method>& methods() {
  static const std::vector<Method> all = {{Compression::kNone},
                                          {Compression::kBFloat16},
                                          {Compression::kFloat16},
                                          {Compression::kQsgd, {.bits = 4}},
                                          {Compression::kQsgd, {.bits = 3, .entropy_coded = true}},
                                          {Compression::kSign},
                                          {Compression::kPowerSgd, {.rank = 2}},
                                          {Compression::kPowerSgdAlternating, {.rank = 2}},
                                          {Compression::kTopK, {.density = 0.05}},
                                          {Compression::kGTopK, {.density = 0.05}},
                                          {Compression::kGTopKTree, {.density = 0.05}},
                                          {Compression::kOkTopK, {.density = 0.05}},
                                          {Compression::kDgc, {.density = 0.05}}};
  return all;
}

/// Tensors that are trained, of all shapes: one in columns, one without dimensions, one of another dtype.
Shard::Named parameters_for(Compression method) {
  torch::manual_seed(3);
  const bool takes_float_only = method == Compression::kDgc;
  Shard::Named all = {{"matrix", torch::randn({40, 13})},
                      {"vector", torch::randn({700})},
                      {"scalar", torch::randn({})},
                      {"sometimes", torch::randn({300})},
                      {"columns", torch::randn({33, 25}).t()},
                      {"other", torch::randn({37}, takes_float_only ? at::kFloat : at::kDouble)}};
  for (auto& [name, tensor] : all) tensor.set_requires_grad(true);
  return all;
}

/// Whether a rank uses a parameter in a step: one is used by all, by one of them, or by none.
bool uses(int of, int step, const std::string& name) {
  return name != "sometimes" || step % 3 == 0 || (step % 3 == 1 && of == 0);
}
Tensor gradient(int of, int step, const Tensor& like, std::size_t number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(10000 * number + 100 * of + step);
  return torch::randn(like.sizes(), generator, like.options().requires_grad(false));
}

/// Trains by a shard, whose passes are autograd's.
class BySharding {
 public:
  BySharding(const Method& method, std::int64_t bucket_bytes)
      : parameters(parameters_for(method.compression)),
        sharded(parameters, {}, group(),
                {.bucket_bytes = bucket_bytes,
                 .compression = method.compression,
                 .compression_options = method.options}) {}
  void step(int step) {
    Tensor loss = torch::zeros({}, at::kDouble);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      auto& [name, tensor] = parameters[i];
      tensor.mutable_grad().reset();
      if (uses(rank(), step, name)) loss = loss + (tensor * gradient(rank(), step, tensor, i)).sum();
    }
    loss.backward();
    const torch::NoGradGuard no_grad;
    for (auto& [name, tensor] : parameters) {
      if (tensor.grad().defined()) tensor.sub_(tensor.grad() * 0.1);
    }
  }
  Shard::Named parameters;
  Shard sharded;
};

/// Trains by the hook, whose buckets this makes: of so many parameters, in another order in each step.
class ByHook {
 public:
  ByHook(const Method& method, std::int64_t bucket_bytes, std::size_t in_bucket, bool is_view = false)
      : parameters(parameters_for(method.compression)),
        hook(std::make_unique<DdpHook>(parameters, group(),
                                       DdpHookOptions{.bucket_bytes = bucket_bytes,
                                                      .compression = method.compression,
                                                      .compression_options = method.options})),
        bucket_bytes_(bucket_bytes),
        in_bucket_(in_bucket),
        is_view_(is_view) {}
  std::string text() const {
    return std::string(name_of(hook->compression())) + " in buckets of " + std::to_string(bucket_bytes_) +
           " bytes, given in buckets of " + std::to_string(in_bucket_) + (is_view_ ? " that are seen" : "") +
           " on rank " + std::to_string(rank());
  }

  struct Bucket {
    Tensor buffer;
    std::vector<Tensor> parameters;
    std::vector<std::pair<std::size_t, Tensor>> gradients;  ///< in it, by the parameter's number
  };
  /// As torch makes them: a bucket has one dtype. A rank's gradient of what it has not used is zero.
  std::vector<Bucket> buckets_of(int step) {
    std::vector<std::size_t> order(parameters.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(step)));
    std::vector<std::vector<std::size_t>> cut;
    for (const std::size_t i : order) {
      const auto dtype = [&](std::size_t of) { return parameters[of].second.scalar_type(); };
      if (cut.empty() || cut.back().size() == in_bucket_ || dtype(cut.back().front()) != dtype(i))
        cut.emplace_back();
      cut.back().push_back(i);
    }
    std::vector<Bucket> all;
    for (const auto& numbers : cut) {
      std::int64_t elements = 0, offset = 0;
      for (const std::size_t i : numbers) elements += parameters[i].second.numel();
      Bucket& made = all.emplace_back();
      made.buffer =
          torch::zeros({elements}, parameters[numbers.front()].second.options().requires_grad(false));
      for (const std::size_t i : numbers) {
        const auto& [name, tensor] = parameters[i];
        const Tensor place = made.buffer.narrow(0, offset, tensor.numel())
                                 .as_strided(tensor.sizes(), tensor.strides(), offset);
        if (uses(rank(), step, name)) place.copy_(gradient(rank(), step, tensor, i));
        made.parameters.push_back(tensor);
        made.gradients.emplace_back(i, place);
        offset += tensor.numel();
      }
    }
    return all;
  }

  void step(int step) {
    std::vector<Bucket> buckets = buckets_of(step);
    Tensor used = torch::zeros({static_cast<std::int64_t>(parameters.size())}, at::kInt);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      for (int of = 0; of < size(); ++of)
        used[static_cast<std::int64_t>(i)] += uses(of, step, parameters[i].first) ? 1 : 0;
    }
    const auto is_used = [&](std::size_t i) { return used[static_cast<std::int64_t>(i)].item<int>() > 0; };
    for (std::size_t number = 0; number < buckets.size(); ++number) {
      for (const auto& [i, place] : buckets[number].gradients) {
        Tensor& own = parameters[i].second.mutable_grad();
        own = is_view_ && is_used(i) ? place : Tensor();
      }
      hook->exchange(buckets[number].buffer, buckets[number].parameters, number + 1 == buckets.size());
    }
    hook->end_pass(used);
    const torch::NoGradGuard no_grad;
    for (const Bucket& bucket : buckets) {
      for (const auto& [i, place] : bucket.gradients) {
        if (is_used(i)) parameters[i].second.sub_(place * 0.1);
      }
    }
  }
  Shard::Named parameters;
  std::unique_ptr<DdpHook> hook;

 private:
  std::int64_t bucket_bytes_;
  std::size_t in_bucket_;
  bool is_view_;
};

void expect_equal(const Shard::Named& found, const Shard::Named& expected, const std::string& text) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::equal(found[i].second, expected[i].second))
        << text << ": " << expected[i].first << " on rank " << rank();
  }
}
void expect_equal(const OptimizerState::Values& found, const OptimizerState::Values& expected,
                  const std::string& text) {
  ASSERT_EQ(found.size(), expected.size()) << text;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i].first, expected[i].first) << text;
    const c10::IValue &own = found[i].second, &other = expected[i].second;
    EXPECT_TRUE(other.isTensor() ? torch::equal(own.toTensor(), other.toTensor()) : own == other)
        << text << ", " << expected[i].first;
  }
}
void expect_equal(const Communication& found, const Communication& expected, const std::string& text) {
  EXPECT_EQ(found.method, expected.method) << text;
  EXPECT_EQ(found.ranks, expected.ranks) << text;
  expect_equal(found.numbers, expected.numbers, text);
  ASSERT_EQ(found.of_ranks.size(), expected.of_ranks.size()) << text;
  for (std::size_t of = 0; of < expected.of_ranks.size(); ++of) {
    EXPECT_EQ(found.of_ranks[of].first, expected.of_ranks[of].first) << text;
    const auto &own = found.of_ranks[of].second, &other = expected.of_ranks[of].second;
    ASSERT_EQ(own.size(), other.size()) << text;
    for (std::size_t i = 0; i < other.size(); ++i) {
      EXPECT_EQ(own[i].first, other[i].first) << text;
      expect_equal(own[i].second, other[i].second, text + ", " + other[i].first);
    }
  }
}

constexpr int kSomeSteps = 4;
constexpr std::int64_t kBucketBytes[] = {1, 3000, std::int64_t{1} << 20};

TEST(DdpHook, IsTheShardThatReplicates) {
  for (const Method& method : methods()) {
    for (const std::int64_t bucket_bytes : kBucketBytes) {
      BySharding expected(method, bucket_bytes);
      std::vector<std::unique_ptr<ByHook>> all;
      for (const std::size_t in_bucket : {1, 2, 6})
        all.push_back(std::make_unique<ByHook>(method, bucket_bytes, in_bucket));
      all.push_back(std::make_unique<ByHook>(method, bucket_bytes, 2, /*is_view=*/true));
      for (int step = 0; step < kSomeSteps; ++step) {
        expected.step(step);
        const Communication held_back = expected.sharded.communication();
        for (std::size_t i = 0; i < all.size(); ++i) {
          all[i]->step(step);
          const std::string text = all[i]->text() + ", step " + std::to_string(step);
          expect_equal(all[i]->parameters, expected.parameters, text);
          expect_equal(all[i]->hook->state(), held_back, text);
          EXPECT_EQ(all[i]->hook->sent_bytes(), all.front()->hook->sent_bytes()) << text;
        }
      }
      EXPECT_EQ(all.front()->hook->sent_bytes() > 0, size() > 1);
      EXPECT_EQ(all.front()->hook->compression(), method.compression);
      EXPECT_FALSE(all.front()->hook->compression_prices().has_value());
    }
  }
}

// Without counts a parameter that no rank has used counts as zero.
TEST(DdpHook, WithoutCountsAllAreUsed) {
  if (size() == 1) return;  // nothing is held back
  ByHook run({Compression::kTopK, {.density = 0.05}}, 3000, 2);
  run.step(0);
  const auto held = [&] {
    const Communication own = run.hook->state();
    Tensor found;
    for (const auto& [name, values] : own.of_ranks.front().second) {
      if (name == "sometimes") found = values.front().second.toTensor().clone();
    }
    return found;
  };
  const Tensor before = held();
  ASSERT_TRUE(before.defined() && before.abs().max().item<float>() > 0);
  for (const bool counts : {true, false}) {
    std::vector<ByHook::Bucket> buckets = run.buckets_of(2);  // of which no rank uses it
    for (std::size_t i = 0; i < buckets.size(); ++i)
      run.hook->exchange(buckets[i].buffer, buckets[i].parameters, i + 1 == buckets.size());
    Tensor used = torch::ones({static_cast<std::int64_t>(run.parameters.size())}, at::kLong);
    used[3] = 0;
    run.hook->end_pass(counts ? std::optional(used) : std::nullopt);
    run.hook->end_pass();  // that of no pass is none
    EXPECT_EQ(torch::equal(held(), before), counts) << "rank " << rank();
  }
}

// A hook resumes from a hook's state (each rank's own, all ranks' or rank 0's) and from a shard's, and a
// shard from a hook's.
TEST(DdpHook, GoesOnFromAState) {
  constexpr std::int64_t kBytes = 3000;
  for (const Method& method : methods()) {
    ByHook whole(method, kBytes, 2);
    const std::string text = whole.text();
    for (int step = 0; step < 2; ++step) whole.step(step);
    std::vector<Tensor> values;
    for (const auto& [name, tensor] : whole.parameters) values.push_back(tensor.detach().clone());
    const Communication all = whole.hook->full_state(), of_rank_0 = whole.hook->full_state(true);
    expect_equal(of_rank_0,
                 rank() == 0 ? all : Communication{of_rank_0.method, of_rank_0.ranks, of_rank_0.numbers, {}},
                 text);
    for (int step = 2; step < kSomeSteps; ++step) whole.step(step);
    const auto put = [&](const Shard::Named& parameters) {
      const torch::NoGradGuard no_grad;
      for (std::size_t i = 0; i < values.size(); ++i) parameters[i].second.detach().copy_(values[i]);
    };
    const std::vector<std::vector<Communication>> ways = {
        {all}, rank() == 0 ? std::vector{all} : std::vector<Communication>{}};
    for (const std::vector<Communication>& given : ways) {
      ByHook resumed(method, kBytes, /*in_bucket=*/4);
      put(resumed.parameters);
      resumed.hook->load_state(given);
      for (int step = 2; step < kSomeSteps; ++step) resumed.step(step);
      expect_equal(resumed.parameters, whole.parameters, text);
      expect_equal(resumed.hook->state(), whole.hook->state(), text);
    }
    BySharding sharded(method, kBytes);
    put(sharded.parameters);
    torch::optim::SGD optimizer(sharded.sharded.parameters(), torch::optim::SGDOptions(0.1));
    OptimizerState state = sharded.sharded.full_optimizer_state(optimizer);
    state.communication = all;
    sharded.sharded.load_optimizer_state(optimizer, {state});
    for (int step = 2; step < kSomeSteps; ++step) sharded.step(step);
    expect_equal(sharded.parameters, whole.parameters, text + ", by a shard");
    const Communication of_shard = sharded.sharded.full_optimizer_state(optimizer).communication;
    expect_equal(of_shard, whole.hook->full_state(), text + ", by a shard");
    ByHook back(method, kBytes, 1);
    back.hook->load_state({of_shard});
    expect_equal(back.hook->state(), whole.hook->state(), text + ", from a shard");
  }
}

void expect_refused(const std::string& text, const std::function<void()>& call) {
  const std::string said = config_error(call);
  EXPECT_NE(said.find(text), std::string::npos) << "rank " << rank() << ", expected " << text << ": " << said;
}

TEST(DdpHook, StatesThatCannotBeAreRefusedOnAllRanks) {
  if (size() == 1) return;
  ByHook run({Compression::kTopK, {.density = 0.05}}, 3000, 2);
  for (int step = 0; step < 2; ++step) run.step(step);
  const Communication right = run.hook->full_state();
  const auto refused = [&](const std::string& text, const std::function<void(Communication&)>& change) {
    for (const bool everywhere : {true, false}) {
      Communication given = right;
      if (everywhere || rank() == 0) change(given);
      const std::string said = config_error([&] { run.hook->load_state({given}); });
      EXPECT_TRUE(everywhere ? said.find(text) != std::string::npos : !said.empty()) << text << ": " << said;
      expect_equal(run.hook->full_state(), right, text);
    }
  };
  refused("by compression gtopk", [](Communication& given) { given.method = "gtopk"; });
  refused("nobody", [](Communication& given) { given.of_ranks.front().second.front().first = "nobody"; });
  refused("rank", [](Communication& given) { given.of_ranks.pop_back(); });
  run.hook->load_state({right});
  run.step(2);
}

TEST(DdpHook, OptionsAndParametersThatCannotBeAreRefused) {
  const Shard::Named good = parameters_for(Compression::kNone);
  const auto with = [&](const DdpHookOptions& options) {
    return [&good, options] { DdpHook(good, group(), options); };
  };
  expect_refused("no process group", [&] { DdpHook(good, {}); });
  expect_refused("no parameters", [] { DdpHook({}, group()); });
  expect_refused("bucket_bytes 0", with({.bucket_bytes = 0}));
  expect_refused("density", with({.compression_options = {.density = 0.5}}));
  expect_refused("allow, and compression none", with({.allow = {ExchangeClass::kExact}}));
  expect_refused("gives a momentum to an optimizer",
                 with({.compression = Compression::kOneBitAdam, .compression_options = {.warmup_steps = 2}}));
  expect_refused("parameter other, which has gradients of Double", with({.compression = Compression::kDgc}));
  const auto of = [](const Tensor& tensor, Compression compression = Compression::kNone) {
    return [=] { DdpHook({{"bad", tensor}}, group(), {.compression = compression}); };
  };
  const Tensor leaf = torch::randn({8}).set_requires_grad(true);
  expect_refused("bad, which is not a leaf", of(leaf * 2));
  expect_refused("bad, which is sparse or has gaps",
                 of(torch::randn({8, 8}).narrow(1, 0, 3).set_requires_grad(true)));
  expect_refused("bad, which is of Half, and a compression",
                 of(torch::randn({8}).to(at::kHalf).set_requires_grad(true), Compression::kBFloat16));
  expect_refused("bad, which is on meta",
                 of(torch::empty({8}, torch::TensorOptions(at::kMeta)).set_requires_grad(true)));
  if (size() > 1) {
    const std::string differ = "different models or options";
    expect_refused(differ, with({.bucket_bytes = 4096 + rank()}));
    expect_refused(differ, with({.compression = rank() == 0 ? Compression::kTopK : Compression::kGTopK}));
    expect_refused(differ, of(torch::randn({8 + rank()}).set_requires_grad(true)));
    // Wrong on one rank alone, and refused on all.
    EXPECT_NE(config_error(with({.bucket_bytes = rank() == 0 ? 0 : 4096})), "");
  }
  const std::string taken = "another Shard has already, or a DdpHook";
  {
    const DdpHook hook(good, group());
    expect_refused(taken, with({}));
    expect_refused(taken, [&] { Shard(good, {}, group(), {}); });
  }
  {
    const Shard sharded(good, {}, group(), {});
    expect_refused(taken, with({}));
  }
  DdpHook(good, group());  // they are free again
}

// What is wrong in a pass is thrown there and by every call after it; what was held back before that pass can
// be saved, and a new hook goes on from it.
TEST(DdpHook, APassThatCannotBeIsRefusedForGood) {
  using Bucket = ByHook::Bucket;
  const Tensor stranger = torch::randn({700}).set_requires_grad(true);
  struct Wrong {
    std::string text;
    std::function<void(Bucket&)> change;
  };
  const std::vector<Wrong> rows = {
      {"a parameter that reef::DdpHook was not given", [&](Bucket& b) { b.parameters.front() = stranger; }},
      {"in another dtype or size", [](Bucket& b) { b.buffer = b.buffer.to(at::kHalf); }},
      {"in another dtype or size", [](Bucket& b) { b.buffer = b.buffer.narrow(0, 0, b.buffer.numel() - 1); }},
      {"other elements than its parameters",
       [](Bucket& b) {
         b.buffer = torch::cat({b.buffer, b.buffer});
       }},
      {"other elements than its parameters", [](Bucket& b) { b.parameters.clear(); }},
      {"sparse, or not flat memory",
       [](Bucket& b) {
         b.buffer = b.buffer.view({1, -1});
       }},
      {"sparse, or not flat memory",
       [](Bucket& b) {
         b.buffer = torch::stack({b.buffer, b.buffer}, 1).select(1, 0);
       }},
      {"sparse, or not flat memory", [](Bucket& b) { b.buffer = b.buffer.to_sparse(); }},
      {"twice in one pass", [](Bucket& b) {
         b.parameters.push_back(b.parameters.front());
         b.buffer = torch::cat({b.buffer, b.buffer.narrow(0, 0, b.parameters.front().numel())});
       }}};
  const Method method{Compression::kTopK, {.density = 0.05}};
  for (const Wrong& wrong : rows) {
    ByHook run(method, 3000, 2), expected(method, 3000, 2);
    for (int step = 0; step < 2; ++step) {
      run.step(step);
      expected.step(step);
    }
    std::vector<Bucket> buckets = run.buckets_of(2);
    run.hook->exchange(buckets[0].buffer, buckets[0].parameters, false);
    expect_refused("in the middle of a pass", [&] { run.hook->state(); });
    wrong.change(buckets[1]);
    const auto give = [&](std::size_t i) {
      return [&, i] { run.hook->exchange(buckets[i].buffer, buckets[i].parameters, false); };
    };
    expect_refused(wrong.text, give(1));
    expect_refused(wrong.text, give(0));
    run.hook->end_pass();
    expect_refused(wrong.text, give(2));
    const Communication held_back = run.hook->state();
    expect_equal(held_back, expected.hook->state(), wrong.text);
    run.hook.reset();
    run.hook = std::make_unique<DdpHook>(
        run.parameters, group(),
        DdpHookOptions{
            .bucket_bytes = 3000, .compression = method.compression, .compression_options = method.options});
    run.hook->load_state({expected.hook->full_state()});
    for (int step = 2; step < 4; ++step) {
      run.step(step);
      expected.step(step);
      expect_equal(run.parameters, expected.parameters, wrong.text);
    }
  }
}

TEST(DdpHook, APassThatIsNotWholeOrNotEndedIsRefused) {
  const Method method{Compression::kBFloat16};
  {
    ByHook run(method, 3000, 2);
    std::vector<ByHook::Bucket> buckets = run.buckets_of(0);
    expect_refused("gradients of " + std::to_string(buckets[0].parameters.size()) + " of 6 parameters",
                   [&] { run.hook->exchange(buckets[0].buffer, buckets[0].parameters, /*is_last=*/true); });
  }
  ByHook run(method, 3000, 2), expected(method, 3000, 2);
  std::vector<ByHook::Bucket> buckets = run.buckets_of(0);
  for (std::size_t i = 0; i < buckets.size(); ++i)
    run.hook->exchange(buckets[i].buffer, buckets[i].parameters, i + 1 == buckets.size());
  expect_refused("the pass before it has not ended: call end_pass()",
                 [&] { run.hook->exchange(buckets[0].buffer, buckets[0].parameters, false); });
  expect_refused("was told of 5 parameters", [&] { run.hook->end_pass(torch::ones({5})); });
  run.hook->end_pass();  // neither has ended anything
  expected.step(0);
  run.step(1);
  expected.step(1);
  expect_equal(run.hook->state(), expected.hook->state(), "after a pass that was ended late");
}

// Buckets are torch's: when a pass is whole, nothing of Reef's keeps their memory.
TEST(DdpHook, BucketsAreLetGo) {
  for (const Method& method : methods()) {
    ByHook run(method, 3000, 2);
    std::vector<ByHook::Bucket> buckets = run.buckets_of(0);
    for (std::size_t i = 0; i < buckets.size(); ++i)
      run.hook->exchange(buckets[i].buffer, buckets[i].parameters, i + 1 == buckets.size());
    for (ByHook::Bucket& bucket : buckets) {
      bucket.gradients.clear();
      EXPECT_EQ(bucket.buffer.storage().use_count(), 1U) << name_of(method.compression);
      EXPECT_EQ(bucket.buffer.use_count(), 1U) << name_of(method.compression);
    }
    run.hook->end_pass();
  }
}

}  // namespace
}  // namespace reef::shard_tests
