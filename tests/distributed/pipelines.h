// What tests of pipelines share.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "messages.h"
#include "reef/pipeline.h"

namespace reef::pipeline_tests {

using at::Tensor;
using messages::config_error;
using messages::expect_words;
using messages::rank;
using messages::same;
using messages::size;
using messages::world;
using Tensors = PipelineStage::Tensors;

inline Tensor loss_of(const Tensor& output, std::uint32_t micro_batch) {
  return (output - 0.25 * (1 + micro_batch)).square().mean();
}

using Bits = std::map<std::string, Tensor>;
inline Bits gradients_of(const std::vector<std::pair<std::string, Tensor>>& named) {
  Bits bits;
  for (const auto& [name, parameter] : named)
    bits[name] = parameter.grad().defined() ? parameter.grad().clone() : Tensor();
  return bits;
}
inline std::vector<std::pair<std::string, Tensor>> named_of(const torch::nn::Sequential& modules) {
  std::vector<std::pair<std::string, Tensor>> named;
  for (const auto& each : modules->named_parameters()) named.emplace_back(each.key(), each.value());
  return named;
}

}  // namespace reef::pipeline_tests
