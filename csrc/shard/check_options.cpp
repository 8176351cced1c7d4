#include "shard/check_options.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/build_info.h"
#include "reef/error.h"
#include "shard/dtypes.h"
#include "shard/shard_parts.h"

namespace reef {

void check_device(const std::string& what, c10::Device device, Compression compression,
                  const ProcessGroupPtr& group) {
  if (compression == Compression::kNone || device.is_cpu()) return;
  const std::string given = what + " on " + device.str() + ", and compression " + name_of(compression);
  if (!compresses_on_devices(compression))
    throw ConfigError(given + ", which is for gradients on the CPU: take bfloat16, topk or none.");
  if (compression == Compression::kBFloat16 || compression == Compression::kFloat16) return;
  if (!device.is_cuda())
    throw ConfigError(given + ", which is for gradients on the CPU and on CUDA: take bfloat16 or none.");
  if (build_info().built_cuda.empty()) {
    throw ConfigError(given +
                      ", and this Reef was built without CUDA: build it with -DREEF_WITH_CUDA=ON, or take "
                      "bfloat16 or none.");
  }
  const auto devices = group->getDeviceTypes();
  const bool has_cpu =
      std::any_of(devices.begin(), devices.end(), [](c10::Device each) { return each.is_cpu(); });
  if (group->getSize() > 1 && !has_cpu) {
    throw ConfigError(given +
                      ", whose entries travel between CPUs, and the group has no backend for these: make it "
                      "with reef::init_process_group, or with \"cpu:gloo,cuda:nccl\".");
  }
}

void check_options(const std::string& caller, const Shard::Named& parameters, const ShardOptions& options,
                   const ProcessGroupPtr& group) {
  const int ranks = group->getSize();
  if (options.bucket_bytes <= 0) {
    throw ConfigError(caller + " was given bucket_bytes " + std::to_string(options.bucket_bytes) +
                      ": give a positive number.");
  }
  if (options.resident_bytes.value_or(0) < 0) {
    throw ConfigError(caller + " was given resident_bytes " + std::to_string(*options.resident_bytes) +
                      ": give 0 or more, or leave it out.");
  }
  if (const int degree = options.shard_degree; degree != 0) {
    const std::string given = caller + " was given shard_degree " + std::to_string(degree);
    if (degree < 0 || ranks % degree != 0) {
      throw ConfigError(given + ", and the group has " + std::to_string(ranks) +
                        " ranks: give a number that divides that.");
    }
    if (options.stage == Stage::kReplicate)
      throw ConfigError(given + " at stage kReplicate, which divides nothing: leave it out.");
    if (degree != ranks && options.sum_order == SumOrder::kNative)
      throw ConfigError(given + " and sum_order kNative, which is among all ranks: leave one of them out.");
  }
  if (const auto& mixed = options.mixed_precision) {
    const auto is_16_bit = [](at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; };
    const auto name = [](at::ScalarType dtype) { return std::string(c10::toString(dtype)); };
    if (!is_16_bit(mixed->parameters)) {
      throw ConfigError(caller + " was given MixedPrecision with parameters of " + name(mixed->parameters) +
                        ": give BFloat16 or Half.");
    }
    if (mixed->sums != at::kFloat && mixed->sums != mixed->parameters) {
      throw ConfigError(caller + " was given MixedPrecision with sums of " + name(mixed->sums) +
                        ": give Float, or what the parameters are, " + name(mixed->parameters) + ".");
    }
  }
  check_compression(options.compression, options.compression_options);
  const bool compresses = options.compression != Compression::kNone;
  if (compresses && options.sum_order == SumOrder::kNative)
    throw ConfigError(
        caller +
        " was given a compression and sum_order kNative, which adds up whole gradients: leave one "
        "of them out.");
  const bool chooses = options.compression == Compression::kAuto;
  if (!chooses && !options.allow.empty()) {
    throw ConfigError(caller + " was given allow, and compression " +
                      std::string(name_of(options.compression)) + ", which chooses nothing: leave it out.");
  }
  if (chooses) price_exchange({0, 1, 0}, 1, {}).fastest(options.allow);  // refuses classes without a method
  if (chooses && options.shard_degree != 0 && options.shard_degree != ranks) {
    throw ConfigError(caller +
                      " was given compression auto and a shard_degree, and prices are of ranks that have one "
                      "copy: name a method, or leave shard_degree out.");
  }
  const bool gives_momentum = options.compression == Compression::kOneBitAdam;
  if (gives_momentum && options.reduction != Reduction::kMean) {
    throw ConfigError(caller +
                      " was given compression one_bit_adam, whose momentum is of means, and reduction kSum: "
                      "take kMean.");
  }
  for (const auto& [name, tensor] : parameters) {
    const std::string which = caller + " was given parameter " + name + ", which ";
    const at::ScalarType of_sums = dtypes_of(tensor.scalar_type(), options.mixed_precision).sum;
    const bool is_float_sum = tensor.is_cpu() && of_sums == at::kFloat;
    if (gives_momentum && tensor.requires_grad() && !is_float_sum) {
      throw ConfigError(
          which +
          "is on a device or whose gradient is not float32, and compression one_bit_adam, whose momentum is "
          "float32 on the CPU: leave it out, or give MixedPrecision with sums of Float.");
    }
    if (chooses && tensor.requires_grad() && !is_float_sum) {
      throw ConfigError(which +
                        "is on a device or whose gradient is not float32, and compression auto, which prices "
                        "float32 on the CPU: name a method.");
    }
    if (tensor.requires_grad()) check_device(which + "is", tensor.device(), options.compression, group);
    if (has_momentum(options.compression) && tensor.requires_grad() && of_sums != at::kFloat) {
      throw ConfigError(
          which + "has gradients of " + c10::toString(of_sums) + ", and compression " +
          name_of(options.compression) +
          ", whose momentum is of float32: take another method, and an optimizer with momentum.");
    }
    const at::ScalarType computed = dtypes_of(tensor.scalar_type(), options.mixed_precision).parameter;
    if (compresses && tensor.requires_grad() && computed == at::kHalf) {
      throw ConfigError(
          which +
          "is of Half, and a compression, which holds gradients back: a loss scale that changes "
          "would scale those. Take BFloat16, or leave compression out.");
    }
    if (tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense())
      throw ConfigError(which + "is sparse or has gaps: make it dense.");
    if (tensor.requires_grad() && ClaimedParameters::find(tensor)) {
      throw ConfigError(
          which +
          "another Shard has already, or a DdpHook: shard a module once, or end that one first (C++: destroy "
          "it; Python: end(), close()).");
    }
    if (!tensor.is_leaf()) throw ConfigError(which + "is not a leaf: give the tensors that are trained.");
    if (tensor.device() != parameters.front().second.device()) {
      throw ConfigError(which + "is on " + tensor.device().str() + " and not on " +
                        parameters.front().second.device().str() +
                        " as others: move the module to one device.");
    }
  }
}

}  // namespace reef
