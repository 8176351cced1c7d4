#pragma once

#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "python_function.h"
#include "reef/pipeline.h"

namespace reef::bind {

/// Of a Python function that makes a stage: it returns the numbers of two functions, which run the stage and
/// give its buffers; names of parameters and buffers, of what it gives, and of what it takes, each as bytes,
/// a line for a name; and the parameters.
inline PipelineStage stage_made_by(const PythonFunction& maker) {
  const std::vector<at::Tensor> made = maker({});
  PipelineStage stage;
  stage.run = PythonFunction(made.at(0)[0].item<std::int64_t>());
  const auto lines_at = [&](std::size_t place) {
    const at::Tensor& bytes = made.at(place);
    return std::istringstream(std::string(static_cast<const char*>(bytes.const_data_ptr()),
                                          static_cast<std::size_t>(bytes.numel())));
  };
  std::istringstream names = lines_at(1), gives = lines_at(2), takes = lines_at(3);
  std::string name;
  while (std::getline(gives, name)) stage.gives.push_back(name);
  while (std::getline(takes, name)) stage.takes.push_back(name);
  for (std::size_t i = 4; i < made.size(); ++i) {
    std::getline(names, name);
    stage.parameters.emplace_back(name, made[i]);
  }
  std::vector<std::string> of_buffers;
  while (std::getline(names, name)) of_buffers.push_back(name);
  stage.buffers = [of_buffers, now = PythonFunction(made.at(0)[1].item<std::int64_t>())] {
    std::vector<std::pair<std::string, at::Tensor>> buffers;
    if (of_buffers.empty()) return buffers;
    const std::vector<at::Tensor> tensors = now({});
    for (std::size_t i = 0; i < of_buffers.size(); ++i) buffers.emplace_back(of_buffers[i], tensors.at(i));
    return buffers;
  };
  return stage;
}

/// A loss of the last stage's outputs; none without a number.
inline std::function<at::Tensor(const std::vector<at::Tensor>&)> loss_of_outputs(
    std::optional<std::int64_t> number) {
  if (!number) return {};
  return [call = PythonFunction(*number)](const std::vector<at::Tensor>& outputs) {
    return call(outputs).at(0);
  };
}

}  // namespace reef::bind
