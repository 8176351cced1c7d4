// Run as several ranks by tests/support/ranks.py.
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pipelines.h"

namespace reef {
namespace {

using namespace pipeline_tests;

TEST(Pipeline, SeveralTensorsOfAnyKind) {
  const std::uint32_t count = 6;
  const auto loss_of_many = [](const Tensors& outputs, std::uint32_t) {
    return outputs[0].sum() + outputs[1].square().sum();
  };
  std::vector<PipelineStage> stages, reference;
  for (std::uint32_t i = 0; i < count; ++i)
    stages.push_back(stage_of_many(i)), reference.push_back(stage_of_many(i));
  Pipeline pipeline(stages, world(), {.micro_batches = 3});
  const Tensor input = torch::arange(27, at::kFloat).reshape({9, 3}) / 27;
  const Tensor loss = pipeline.step(Tensors{input}, loss_of_many);
  Bits expected;
  Tensor sum;
  for (const Tensor& part : input.tensor_split(3)) {
    Tensors tensors = {part};
    for (const PipelineStage& stage : reference) tensors = stage.run(tensors);
    const Tensor own = loss_of_many(tensors, 0);
    own.backward();
    sum = sum.defined() ? sum + own.detach() : own.detach();
  }
  for (const PipelineStage& stage : reference) {
    const auto& [name, weight] = stage.parameters.front();
    if (weight.grad().defined()) expected[name] = weight.grad().div(3);
  }
  EXPECT_TRUE(same(loss, sum / 3));
  expect_part_of(expected, pipeline, "");
}

/// The same values in other memory.
Tensor laid_out(const Tensor& values, std::uint32_t how) {
  const std::int64_t rows = values.size(0), columns = values.size(1), width = values.size(2);
  switch (how % 6) {
    case 0:
      return values.transpose(0, 1).contiguous().transpose(0, 1);
    case 1:  // beginning at no multiple of 64 bytes
      return torch::cat({torch::zeros({1}), values.flatten()})
          .narrow(0, 1, values.numel())
          .view(values.sizes());
    case 2:
      return torch::cat({values, values}, 2).narrow(2, 1, width);
    case 3:
      return values.transpose(1, 2).contiguous().transpose(1, 2);
    case 4:
      return values.select(1, 0).unsqueeze(1).expand({rows, columns, width});
    default:
      return values;
  }
}

// Kernels of matrix products choose by strides and addresses how they add up.
TEST(Pipeline, WhatIsReceivedLiesInMemoryAsWhereItWasMade) {
  constexpr std::int64_t kRows = 3, kColumns = 7, kWidth = 5;
  constexpr std::uint32_t kStages = 7;
  for (const bool recompute : {false, true}) {
    for (std::uint32_t first = 0; first < 6; ++first) {
      std::vector<torch::nn::Linear> linear;
      std::vector<PipelineStage> stages;
      torch::manual_seed(3);
      for (std::uint32_t i = 0; i < kStages; ++i) {
        linear.emplace_back(kWidth, kWidth);
        PipelineStage stage;
        for (const auto& each : linear.back()->named_parameters())
          stage.parameters.emplace_back(std::to_string(i) + "." + each.key(), each.value());
        stage.run = [own = linear.back(), how = first + i](const Tensors& inputs) mutable -> Tensors {
          return {laid_out(own(inputs.front()).tanh(), how)};
        };
        stages.push_back(stage);
      }
      const Tensor input = torch::randn({2 * kRows + 1, kColumns, kWidth});
      Bits expected;
      for (std::uint32_t m = 0; m < 2; ++m) {
        Tensors tensors = {input.tensor_split(2)[m]};
        for (const PipelineStage& stage : stages) tensors = stage.run(tensors);
        loss_of(tensors.front(), m).backward();
      }
      for (const PipelineStage& stage : stages) {
        for (const auto& [name, parameter] : stage.parameters) {
          expected[name] = parameter.grad().div(2);
          parameter.mutable_grad().reset();
        }
      }
      Pipeline pipeline(stages, world(), {.micro_batches = 2, .recompute = recompute});
      pipeline.step(input, loss_of);
      expect_part_of(expected, pipeline, (recompute ? " recompute " : " ") + std::to_string(first));
    }
  }
}

// As of an adversarial example.
TEST(Pipeline, ABatchMayWantAGradient) {
  const auto loss_of_first = [](const Tensors& outputs, std::uint32_t) { return outputs[0].square().sum(); };
  for (const bool recompute : {false, true}) {
    std::vector<PipelineStage> stages, reference;
    for (std::uint32_t i = 0; i < 5; ++i)
      stages.push_back(stage_of_many(i)), reference.push_back(stage_of_many(i));
    const Tensor given = torch::arange(12, at::kFloat).reshape({4, 3}) / 7;
    const Tensor own = given.clone().set_requires_grad(true), other = given.clone().set_requires_grad(true);
    for (const Tensor& part : other.tensor_split(2)) {
      Tensors tensors = {part};
      for (const PipelineStage& stage : reference) tensors = stage.run(tensors);
      loss_of_first(tensors, 0).backward();
    }
    Pipeline pipeline(stages, world(), {.micro_batches = 2, .schedule = "gpipe", .recompute = recompute});
    pipeline.step(Tensors{own}, loss_of_first);
    if (rank() == 0) {
      EXPECT_TRUE(same(own.grad(), other.grad()));
    }
  }
}

/// With a network that is not there on one rank, ranks have no connections of their own; gloo has its network
/// already.
class OnlyByGloo {
 public:
  explicit OnlyByGloo(bool only) : only_(only && rank() == 0) {
    const char* const before = std::getenv("GLOO_SOCKET_IFNAME");
    if (before != nullptr) before_ = before;
    if (only_) ::setenv("GLOO_SOCKET_IFNAME", "no-such-network", 1);
  }
  ~OnlyByGloo() {
    if (only_ && before_) ::setenv("GLOO_SOCKET_IFNAME", before_->c_str(), 1);
    if (only_ && !before_) ::unsetenv("GLOO_SOCKET_IFNAME");
  }
  OnlyByGloo(const OnlyByGloo&) = delete;
  OnlyByGloo& operator=(const OnlyByGloo&) = delete;

 private:
  bool only_;
  std::optional<std::string> before_;
};

/// Waits until the number of descriptors is stable: threads may still close those of an earlier test.
messages::Held held_at_rest() {
  messages::Held held;
  for (int same = 0; same < 10; ++same) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const messages::Held now;
    if (now.descriptors != held.descriptors) same = 0;
    held = now;
  }
  return held;
}

void expect_tensors_travel(bool only_by_gloo) {
  const std::vector<at::ScalarType> dtypes = {
      at::kFloat, at::kDouble,       at::kHalf,          at::kBFloat16, at::kByte,        at::kLong,
      at::kBool,  at::kComplexFloat, at::kFloat8_e4m3fn, at::kUInt16,   at::kComplexHalf, at::kShort};
  // Some are larger, then smaller than those before; one call has more of them than the first message can
  // describe.
  const auto tensors_of = [&](std::int64_t call, std::int64_t row) {
    Tensors all;
    const std::vector<std::vector<std::int64_t>> shapes = {
        {}, {1 + row}, {2, 0, 5}, {3 * call + 1, 2, row + 1}};
    for (std::int64_t repeat = 0; repeat < (call == 2 ? 5 : 1); ++repeat) {
      for (const auto dtype : dtypes) {
        for (const auto& shape : shapes) {
          all.push_back(messages::value(static_cast<std::int64_t>(all.size()) + row + call, shape, dtype));
          if (all.size() % 7 == 0) all.emplace_back();
        }
      }
    }
    return all;
  };
  std::int64_t call = 0;
  std::vector<PipelineStage> stages(static_cast<std::size_t>(size()));
  for (PipelineStage& stage : stages) {
    stage.run = [&](const Tensors& given) -> Tensors {
      return given.size() == 1 ? tensors_of(call, given[0].item<std::int64_t>()) : given;
    };
  }
  std::int64_t row = 0;
  stages.back().run = [&, before = stages.back().run](const Tensors& given) -> Tensors {
    const Tensors came = before(given), expected = tensors_of(call, row++);
    EXPECT_EQ(came.size(), expected.size());
    for (std::size_t i = 0; i < came.size() && i < expected.size(); ++i) {
      EXPECT_EQ(came[i].defined(), expected[i].defined());
      EXPECT_TRUE(!came[i].defined() || same(came[i], expected[i])) << i << " of call " << call;
    }
    return {torch::zeros({1})};
  };
  const messages::Held before = held_at_rest();
  const OnlyByGloo network(only_by_gloo);
  Pipeline pipeline(stages, world(), {.micro_batches = 6, .schedule = "gpipe"});
  const std::ptrdiff_t neighbours = (rank() > 0 ? 1 : 0) + (rank() + 1 < size() ? 1 : 0);
  EXPECT_EQ(messages::Held().descriptors - before.descriptors, only_by_gloo ? 0 : neighbours);
  for (; call < 4; ++call, row = 0) pipeline.forward(Tensors{torch::arange(6).reshape({6, 1})});
}

TEST(Pipeline, TensorsOfEveryDtypeAndShapeTravel) { expect_tensors_travel(/*only_by_gloo=*/false); }

TEST(Pipeline, MessagesGoByGlooWhereRanksHaveNoConnections) { expect_tensors_travel(/*only_by_gloo=*/true); }

TEST(Pipeline, LetsGoOfItsConnections) {
  EXPECT_GT(size(), 0);  // the group is there
  const messages::Held before = held_at_rest();
  for (int i = 0; i < 3; ++i) {
    std::vector<PipelineStage> stages(static_cast<std::size_t>(size()));
    for (PipelineStage& stage : stages) stage.run = [](const Tensors& given) { return given; };
    Pipeline pipeline(stages, world(), {.micro_batches = 2});
    pipeline.forward(torch::ones({2, 3}));
  }
  EXPECT_TRUE(messages::Held::becomes_at_most(before));
}

TEST(Pipeline, AnOutputThatChangesWhileItIsSentIsAnError) {
  if (size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const Tensor kept = torch::zeros({2, 3});
  std::vector<PipelineStage> stages(static_cast<std::size_t>(size()));
  for (PipelineStage& stage : stages) {
    stage.run = [&](const Tensors& given) -> Tensors {
      if (rank() > 0) return given;
      kept.add_(given[0]);
      return {kept};  // the same memory for every micro-batch
    };
  }
  Pipeline pipeline(stages, world(), {.micro_batches = 2, .schedule = "gpipe"});
  try {
    pipeline.forward(torch::ones({4, 3}));
    ADD_FAILURE() << "did not throw";
  } catch (const c10::Error& error) {
    expect_words(error.what(), {"rank 0", "chunk 0", "modified in place", "give a clone"});
  }
}

}  // namespace
}  // namespace reef
