#include "shard_options.h"

#include <torch/library.h>

#include <optional>
#include <string>
#include <vector>

#include "compression_options.h"
#include "reduction.h"
#include "reef/error.h"

namespace {

reef::Stage stage_of(const std::string& name) {
  if (name == "replicate") return reef::Stage::kReplicate;
  if (name == "optimizer") return reef::Stage::kOptimizer;
  if (name == "gradients") return reef::Stage::kGradients;
  if (name == "parameters") return reef::Stage::kParameters;
  throw reef::ConfigError("stage '" + name +
                          "' is not \"replicate\", \"optimizer\", \"gradients\" or \"parameters\"");
}

reef::Buffers buffers_of(const std::string& name) {
  if (name == "local") return reef::Buffers::kLocal;
  if (name == "broadcast") return reef::Buffers::kBroadcast;
  if (name == "mean") return reef::Buffers::kMean;
  throw reef::ConfigError("buffers '" + name + "' is not \"local\", \"broadcast\" or \"mean\"");
}

reef::SumOrder sum_order_of(const std::string& name) {
  if (name == "ranks") return reef::SumOrder::kRanks;
  if (name == "native") return reef::SumOrder::kNative;
  throw reef::ConfigError("sum_order '" + name + "' is not \"ranks\" or \"native\"");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<reef::bind::ShardOptions>("ShardOptions");
  m.def(
      "shard_options(str stage, int bucket_bytes, str reduction, str sum_order, str compression, str[] "
      "compression_options, int[] option_steps, float[] option_values, str[] allow, int? resident_bytes, int "
      "shard_degree, str buffers, Tensor[] ignored, ScalarType? mixed_parameters, ScalarType mixed_sums, "
      "bool "
      "offload) -> __torch__.torch.classes.reef.ShardOptions",
      [](const std::string& stage, std::int64_t bucket_bytes, const std::string& reduction,
         const std::string& sum_order, const std::string& compression,
         const std::vector<std::string>& option_names, const std::vector<std::int64_t>& option_steps,
         const std::vector<double>& option_values, const std::vector<std::string>& allow,
         std::optional<std::int64_t> resident_bytes, std::int64_t shard_degree, const std::string& buffers,
         const std::vector<at::Tensor>& ignored, std::optional<at::ScalarType> mixed_parameters,
         at::ScalarType mixed_sums, bool offload) {
        std::optional<reef::MixedPrecision> mixed;
        if (mixed_parameters) mixed = {*mixed_parameters, mixed_sums};
        std::vector<reef::ExchangeClass> allowed;
        for (const std::string& each : allow) allowed.push_back(reef::exchange_class_named(each));
        return c10::make_intrusive<reef::bind::ShardOptions>(reef::ShardOptions{
            .stage = stage_of(stage),
            .bucket_bytes = bucket_bytes,
            .reduction = reef::bind::reduction_of(reduction),
            .sum_order = sum_order_of(sum_order),
            .compression = reef::compression_named(compression),
            .compression_options = reef::bind::compression_options(option_names, option_steps, option_values),
            .allow = allowed,
            .resident_bytes = resident_bytes,
            .shard_degree = static_cast<int>(shard_degree),
            .buffers = buffers_of(buffers),
            .ignored = ignored,
            .mixed_precision = mixed,
            .offload = offload});
      });
}
