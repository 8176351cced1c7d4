#include "chain_nets.h"
#include "reef/budget.h"
#include "reef/bytes.h"
#include "reef/chain.h"
#include "reef/error.h"

namespace reef {
namespace {

using namespace chain_tests;

TEST(ChainRun, EverySolverAndBudgetIsBitForBitThePlainRunAndNeedsWhatWasPredicted) {
  for (Net& net : nets()) {
    const Left plain = plain_step(net);
    Chain chain(net.layers);
    const ChainProfile profile = profile_chain(chain, net.input, {.repeats = 1});
    const std::uint64_t least = minimum_bytes(profile), most = natural_peak_bytes(profile);
    EXPECT_LT(least, most) << profile.table();
    // What the loss makes of the output is the program's.
    const double slack = 6.0 * static_cast<double>(profile.stages.back().output_bytes) + 256;
    EXPECT_NEAR(static_cast<double>(plain.peak_bytes), static_cast<double>(most),
                0.02 * static_cast<double>(most) + slack)
        << profile.table();  // of the plain run, as it is without a chain
    for (const ChainSolver solver : kChainSolvers) {
      const bool exact = solver == ChainSolver::kExact;
      for (std::uint64_t i = 0; i <= 10; i += exact ? 5 : 1) {
        const std::uint64_t budget_bytes = least + (most - least) * i / 10;
        Schedule schedule;
        try {
          schedule = plan_chain(profile, budget_bytes, {.solver = solver});
        } catch (const BudgetError&) {
          EXPECT_NE(solver, ChainSolver::kDynamic);
          continue;
        } catch (const ConfigError&) {
          EXPECT_EQ(solver, ChainSolver::kExact);
          continue;
        }
        const std::string of =
            std::string(net.name) + ", " + std::string(name(solver)) + ", " + schedule.text();
        const Left ours =
            step(net, [&](const Tensor& x) { return run(chain, schedule, x, {.check_values = true}); });
        expect_equal(ours, plain, of);
        const auto predicted = static_cast<double>(simulate(profile, schedule).peak_bytes);
        const auto measured = static_cast<double>(ours.peak_bytes);
        // It drops tapes after the loss, which is done when backward first wants something, and inputs that a
        // tape has no use for.
        if (exact) {
          EXPECT_LE(measured, 1.05 * predicted + slack) << of << "\n" << profile.table();
        } else {
          EXPECT_NEAR(measured, predicted, 0.02 * predicted + slack) << of << "\n" << profile.table();
        }
      }
    }
  }
}

TEST(ChainRun, ProfilingLeavesEverythingAsItWas) {
  for (Net& net : nets()) {
    Tensors before;
    for (const Tensor& buffer : net.layers->buffers()) before.push_back(buffer.clone());
    net.layers.ptr()->zero_grad();
    torch::manual_seed(5);
    const Tensor state = at::globalContext().defaultGenerator(at::kCPU).get_state();
    Chain chain(net.layers);
    const ChainProfile profile = profile_chain(chain, net.input);
    EXPECT_EQ(profile.stages.size(), chain.size());
    EXPECT_TRUE(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(state));
    std::size_t index = 0;
    for (const Tensor& buffer : net.layers->buffers()) EXPECT_TRUE(buffer.equal(before[index++]));
    for (const Tensor& parameter : net.layers->parameters()) EXPECT_FALSE(parameter.grad().defined());
    EXPECT_FALSE(net.input.grad().defined());
  }
}

TEST(ChainRun, AProfileCountsWhatCanBeCountedByHand) {
  Chain chain;
  const Tensor weight = torch::randn({32, 64}, torch::requires_grad());
  chain.add("exp", [](const Tensor& x) { return x.exp(); });            // saves its output
  chain.add("mm", [weight](const Tensor& x) { return x.mm(weight); });  // saves its input
  chain.add("sin", [](const Tensor& x) { return x.sin(); });
  const Tensor x = torch::randn({16, 32}, torch::requires_grad());
  const ChainProfile profile = profile_chain(chain, x);
  constexpr std::uint64_t kSmall = 16 * 32 * 4, kLarge = 16 * 64 * 4, kWeight = 32 * 64 * 4;
  const StageProfile& exp = profile.stages[0];
  EXPECT_EQ(exp.output_bytes, kSmall);
  EXPECT_TRUE(exp.tape_has_output);
  EXPECT_FALSE(exp.tape_has_input);
  EXPECT_EQ(exp.tape_bytes, kSmall);
  EXPECT_EQ(exp.gradient_bytes, 0U);
  const StageProfile& mm = profile.stages[1];
  EXPECT_EQ(mm.output_bytes, kLarge);
  EXPECT_FALSE(mm.tape_has_output);
  EXPECT_TRUE(mm.tape_has_input);
  EXPECT_EQ(mm.tape_bytes, 0U);
  EXPECT_EQ(mm.gradient_bytes, kWeight);
  EXPECT_EQ(mm.backward_bytes, kSmall + kWeight);
  EXPECT_EQ(mm.forward_bytes, kLarge);
  EXPECT_EQ(mm.taped_bytes, kLarge);
  const Tensor y = chain(x);
  y.sum().backward();
  EXPECT_EQ(profile_chain(chain, x).stages[1].gradient_bytes, 0U);  // they are there
}

TEST(ChainRun, StagesThatShareMemoryAreJoined) {
  Chain chain;
  chain.add("a", [](const Tensor& x) { return x * 2; });
  chain.add("b", [](Tensor x) { return x.relu_(); });
  chain.add("c", [](const Tensor& x) { return x.view({-1}); });
  chain.add("d", [](const Tensor& x) { return x.exp(); });
  const ChainProfile profile = profile_chain(chain, torch::randn({4, 4}, torch::requires_grad()));
  ASSERT_EQ(chain.size(), 2U);
  EXPECT_EQ(profile.stages[0].name, "a b c");
  EXPECT_EQ(chain.name(1), "d");

  Chain first;
  first.add("in place", [](Tensor x) { return x.relu_(); });
  EXPECT_THROW(profile_chain(first, torch::randn({4})), ConfigError);
  Chain none;
  EXPECT_THROW(profile_chain(none, torch::randn({4})), ConfigError);
  Chain undefined;
  undefined.add("undefined", [](const Tensor&) { return Tensor(); });
  EXPECT_THROW(profile_chain(undefined, torch::randn({4})), ConfigError);
  EXPECT_THROW(profile_chain(chain, torch::randn({4, 4}), {.repeats = 0}), ConfigError);
}

TEST(ChainRun, RetainedGraphsTwoChainsAndOtherGraphsAround) {
  const auto all = nets();
  Chain first(all[0].layers), second(all[0].layers);
  const Tensor x = all[0].input;
  const ChainProfile profile = profile_chain(first, x, {.repeats = 1});
  const Schedule schedule = plan_chain(profile, minimum_bytes(profile));
  const auto loss = [&](bool ours) {
    torch::manual_seed(9);
    const Tensor before = x.tanh();
    const Tensor middle = ours ? run(first, schedule, before) : first(before);
    const Tensor behind = ours ? run(second, schedule, middle.sin()) : second(middle.sin());
    return (behind + middle).pow(2).mean();
  };
  const auto gradient = [&](const Tensor& of, bool keep) {
    return torch::autograd::grad({of}, {x}, {}, keep)[0];
  };
  const Tensor plain = loss(false), ours = loss(true);
  const Tensor wanted = gradient(plain, false);
  EXPECT_TRUE(gradient(ours, true).equal(wanted));
  EXPECT_TRUE(gradient(ours, true).equal(wanted));
  EXPECT_TRUE(gradient(ours, false).equal(wanted));
  EXPECT_ANY_THROW(gradient(ours, false));
}

TEST(ChainRun, InsideABudgetAndACheckpoint) {
  for (Net& net : nets()) {
    const Left plain = plain_step(net);
    Chain chain(net.layers);
    const ChainProfile profile = profile_chain(chain, net.input, {.repeats = 1});
    const Schedule schedule = plan_chain(profile, (minimum_bytes(profile) + natural_peak_bytes(profile)) / 2);
    expect_equal(step(net,
                      [&](const Tensor& x) {
                        return checkpoint([&](const Tensor& in) { return run(chain, schedule, in); }, x);
                      }),
                 plain, net.name);
    Budget budget(4_MiB, {net.layers.get()});
    for (int repeat = 0; repeat < 3; ++repeat) {
      expect_equal(step(net, [&](const Tensor& x) { return run(chain, schedule, x); }), plain, net.name);
    }
    EXPECT_LE(budget.use().peak_bytes, static_cast<std::uint64_t>(4_MiB));
  }
}

TEST(ChainRun, SchedulesForOtherChainsAreRefused) {
  Chain chain(std::vector<Chain::Stage>(3, [](const Tensor& x) { return x.exp(); }));
  const Tensor x = torch::randn({4}, torch::requires_grad());
  EXPECT_THROW(run(chain, {2, {}}, x), ConfigError);
  EXPECT_THROW(run(chain, {3, {}}, x), ConfigError);
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(run(chain, plan_chain(profile_chain(chain, x), 1 << 20), x).requires_grad());
}

TEST(CheckpointSequential, OneLineFitsAndSaysWhatItChose) {
  for (Net& net : nets()) {
    const Left plain = plain_step(net);
    Chain chain(net.layers);
    const ChainProfile profile = profile_chain(chain, net.input, {.repeats = 1});
    const auto budget_bytes =
        static_cast<std::int64_t>((minimum_bytes(profile) + natural_peak_bytes(profile)) / 2);
    const ChainPlan plan = plan_of(net.layers, net.input, budget_bytes);
    EXPECT_LE(plan.cost.peak_bytes, plan.budget_bytes);
    EXPECT_NE(plan.text().find("within " + format_bytes(budget_bytes)), std::string::npos) << plan.text();
    for (int repeat = 0; repeat < 2; ++repeat) {
      const Left ours =
          step(net, [&](const Tensor& x) { return checkpoint_sequential(net.layers, x, budget_bytes); });
      expect_equal(ours, plain, net.name);
    }
    net.layers->zero_grad();
    net.input.mutable_grad() = Tensor();
    // Known by now, seconds and all.
    EXPECT_EQ(plan_of(net.layers, net.input, budget_bytes).profile.json(), plan.profile.json());
    try {
      checkpoint_sequential(net.layers, net.input, 16);
      FAIL();
    } catch (const BudgetError& error) {
      EXPECT_EQ(error.smallest_budget_bytes(), minimum_bytes(plan.profile));
    }
    EXPECT_THROW(checkpoint_sequential(net.layers, net.input, -1), ConfigError);
  }
}

}  // namespace
}  // namespace reef
