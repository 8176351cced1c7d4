// The linear scaling rule: rates, and a run that goes on.
#include "reef/linear_scaling.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <vector>

#include "reef/error.h"
#include "reef/optim.h"

namespace reef {
namespace {

template <class Optimizer, class Options>
void rises(const Options& options) {
  Optimizer optimizer({torch::randn({4, 4}).requires_grad_()}, options);
  LinearScaling scheduler(optimizer, {.factor = 8, .warmup_steps = 7});
  const auto rate = [&] { return optimizer.param_groups()[0].options().get_lr(); };
  for (int step = 0; step < 12; ++step) {
    EXPECT_NEAR(rate(), 0.1 * (1 + std::min(step, 7)), 1e-12);
    const double before = rate();
    scheduler.step();
    EXPECT_NEAR(scheduler.momentum_factor(), rate() / before, 1e-12);
  }
}

TEST(LinearScaling, RatesRiseInEqualStepsToTheFactor) {
  rises<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  rises<optim::SGD>(optim::SGDOptions(0.1));
  rises<optim::LAMB>(optim::LAMBOptions(0.1));
}

TEST(LinearScaling, WithoutAWarmupItIsThereAtOnce) {
  torch::optim::SGD optimizer({torch::randn({4})}, torch::optim::SGDOptions(0.1));
  LinearScaling scheduler(optimizer, {.factor = 4});
  EXPECT_NEAR(optimizer.param_groups()[0].options().get_lr(), 0.4, 1e-15);
  scheduler.step();
  EXPECT_NEAR(optimizer.param_groups()[0].options().get_lr(), 0.4, 1e-15);
}

TEST(LinearScaling, ARunGoesOnWhereItWas) {
  torch::optim::SGD straight({torch::randn({4})}, torch::optim::SGDOptions(0.1));
  LinearScaling whole(straight, {.factor = 8, .warmup_steps = 6});
  for (int step = 0; step < 3; ++step) whole.step();
  torch::optim::SGD other({torch::randn({4})},
                          torch::optim::SGDOptions(straight.param_groups()[0].options().get_lr()));
  LinearScaling rest(other, {.factor = 8, .warmup_steps = 6, .steps_taken = 3});
  for (int step = 3; step < 9; ++step) {
    whole.step();
    rest.step();
    EXPECT_EQ(straight.param_groups()[0].options().get_lr(), other.param_groups()[0].options().get_lr());
  }
}

TEST(LinearScaling, RefusesWhatIsNoScale) {
  torch::optim::SGD optimizer({torch::randn({4})}, torch::optim::SGDOptions(0.1));
  for (const LinearScalingOptions& wrong :
       {LinearScalingOptions{.factor = 0.5},
        LinearScalingOptions{.factor = std::numeric_limits<double>::infinity()},
        LinearScalingOptions{.factor = 2, .warmup_steps = -1},
        LinearScalingOptions{.factor = 2, .steps_taken = -1}})
    EXPECT_THROW(LinearScaling(optimizer, wrong), ConfigError);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.1);
}

}  // namespace
}  // namespace reef
