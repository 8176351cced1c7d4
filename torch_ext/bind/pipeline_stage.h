#pragma once

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "python_function.h"
#include "reef/pipeline.h"

namespace reef::bind {

/// Of a Python function that makes a stage: it returns the numbers of two functions, which run the stage and
/// give its buffers, the names of its parameters and buffers as bytes, a line each, and the parameters.
inline PipelineStage stage_made_by(const PythonFunction& maker) {
  const std::vector<at::Tensor> made = maker({});
  PipelineStage stage;
  stage.run = PythonFunction(made.at(0)[0].item<std::int64_t>());
  const at::Tensor& bytes = made.at(1);
  std::istringstream names(
      std::string(static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(bytes.numel())));
  std::string name;
  for (std::size_t i = 2; i < made.size(); ++i) {
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

}  // namespace reef::bind
