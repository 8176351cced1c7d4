// Sums in the backend's own order, and backends that have no messages (those of devices): what is moved by
// one all-to-all there, in the order of the program; and compressions that there are none of.
#include <string>
#include <vector>

#include "collectives_only.h"
#include "reef/build_info.h"
#include "reef/error.h"
#include "shard_net.h"
#include "support/config_error.h"

namespace reef::shard_tests {
namespace {

Net trained(const Case& tested, const ProcessGroupPtr& among, const ShardOptions& options, Ranks ranks) {
  Net net(7 + rank());
  Shard sharded = shard(*net, among, options);
  train_steps(net, sharded, tested, ranks);
  return net;
}

TEST(ShardBackend, WithoutMessagesEveryStageAndDegreeIsOneProcessThatAccumulates) {
  const ProcessGroupPtr among = collectives_only(group());
  for (const Case& tested : kCases) {
    for (const Stage stage : kStages) {
      Net expected = accumulated(tested, ranks_at(stage), Reduction::kMean);
      for (int degree = 0; degree <= size(); ++degree) {
        if (degree != 0 && (stage == Stage::kReplicate || size() % degree != 0)) continue;
        const ShardOptions options{.stage = stage, .bucket_bytes = 5000, .shard_degree = degree};
        Net net = trained(tested, among, options, ranks_at(stage));
        expect_same(*net, *expected, where(tested, stage, 5000) + ", among " + std::to_string(degree));
      }
    }
  }
}

// Every rank sends its slice of parameters to D - 1 others, and of gradients a slice to all others.
TEST(ShardBackend, WithoutMessagesBytesAreTheFormula) {
  const ProcessGroupPtr among = collectives_only(group());
  for (int degree = 1; degree <= size(); ++degree) {
    if (size() % degree != 0) continue;
    torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
    const std::int64_t slice_bytes = 4 * layer->weight.numel() / degree;
    Shard sharded = shard(*layer, among, {.stage = Stage::kGradients, .shard_degree = degree});
    torch::optim::SGD optimizer(sharded.parameters(), 0.1);
    layer->forward(torch::ones({2, 512})).sum().backward();
    optimizer.step();
    sharded.gather();
    EXPECT_EQ(sharded.sent_bytes(), (size() - 1 + degree - 1) * slice_bytes) << degree;
  }
}

// What it gives up: it is one process that accumulates within rounding, and not bit for bit. The ranks are.
TEST(ShardBackend, TheNativeOrderIsTheSameWithinRounding) {
  for (const Stage stage : kStages) {
    for (const Reduction reduction : {Reduction::kMean, Reduction::kSum}) {
      const Case& tested = kCases[0];
      Net expected = accumulated(tested, ranks_at(stage), reduction);
      const ShardOptions options{
          .stage = stage, .bucket_bytes = 5000, .reduction = reduction, .sum_order = SumOrder::kNative};
      Net net = trained(tested, group(), options, ranks_at(stage));
      const auto theirs = expected->named_parameters();
      for (const auto& item : net->named_parameters()) {
        EXPECT_TRUE(torch::allclose(item.value(), theirs[item.key()], 1e-4, 1e-5))
            << where(tested, stage, 5000) << ": " << item.key() << " is off by "
            << (item.value() - theirs[item.key()]).abs().max().item<double>();
        Tensor of_first = item.value().detach().clone();
        broadcast({of_first}, group());
        EXPECT_TRUE(torch::equal(of_first, item.value())) << item.key();
      }
    }
  }
}

// Over gloo an all-reduce at every stage.
TEST(ShardBackend, TheNativeOrdersBytesAreTheFormula) {
  for (const Stage stage : {Stage::kReplicate, Stage::kGradients}) {
    torch::nn::Linear layer(torch::nn::LinearOptions(512, 96 * size()).bias(false));
    const std::int64_t slice_bytes = 4 * layer->weight.numel() / size();
    Shard sharded = shard(*layer, group(), {.stage = stage, .sum_order = SumOrder::kNative});
    layer->forward(torch::ones({2, 512})).sum().backward();
    EXPECT_EQ(sharded.sent_bytes(), 2 * (size() - 1) * slice_bytes) << static_cast<int>(stage);
  }
}

TEST(ShardBackend, TheNativeOrderIsOfAllRanks) {
  Net net(7);
  const auto with = [](int degree, SumOrder order) {
    return ShardOptions{.stage = Stage::kGradients, .sum_order = order, .shard_degree = degree};
  };
  if (size() > 1) {
    EXPECT_THROW(shard(*net, group(), with(1, SumOrder::kNative)), ConfigError);
    EXPECT_THROW(shard(*net, group(), with(0, rank() == 0 ? SumOrder::kNative : SumOrder::kRanks)),
                 ConfigError);
  }
  EXPECT_NO_THROW(shard(*net, group(), with(size(), SumOrder::kNative)));
}

// A tensor has the name of a device here, as if LibTorch had been built for it; no device is needed for that.
TEST(ShardBackend, OnADeviceWhatIsForTheCpuIsRefused) {
  if (size() > 1) return;  // who would tell each other so by way of the device
  const auto said_of = [](c10::Device device, Compression method, const CompressionOptions& options = {}) {
    const c10::DispatchKeySet keys(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::XPU);
    Tensor weight = at::detail::make_tensor<c10::TensorImpl>(keys, caffe2::TypeMeta::Make<float>(), device);
    torch::nn::Module module;
    module.register_parameter("weight", weight);
    return test::config_error(
        [&] { shard(module, group(), {.compression = method, .compression_options = options}); });
  };
  const auto expect = [](const std::string& said, const std::string& text) {
    EXPECT_NE(said.find(text), std::string::npos) << said << "\nand not: " << text;
  };
  const c10::Device cuda(c10::kCUDA, 1), other(c10::kXPU, 0);
  for (const Compression method :
       {Compression::kQsgd, Compression::kSign, Compression::kPowerSgd, Compression::kPowerSgdAlternating}) {
    for (const c10::Device device : {cuda, other}) {
      expect(said_of(device, method), "was given parameter weight, which is on " + device.str() +
                                          ", and compression " + name_of(method) +
                                          ", which is for gradients on the CPU: take bfloat16, topk or none");
    }
  }
  for (const Compression method : {Compression::kTopK, Compression::kGTopK, Compression::kGTopKTree,
                                   Compression::kOkTopK, Compression::kDgc}) {
    expect(said_of(other, method), "which is on xpu:0, and compression " + std::string(name_of(method)) +
                                       ", which is for gradients on the CPU and on CUDA");
    if (build_info().built_cuda.empty()) {
      expect(said_of(cuda, method), "which is on cuda:1, and compression " + std::string(name_of(method)) +
                                        ", and this Reef was built without CUDA");
    }
  }
  expect(said_of(cuda, Compression::kAuto), "is on a device or whose gradient is not float32");
  expect(said_of(cuda, Compression::kOneBitAdam, {.warmup_steps = 3}),
         "is on a device or whose gradient is not float32");
}

}  // namespace
}  // namespace reef::shard_tests
