#include "pipeline_run/stages.h"

#include <torch/nn/modules/container/sequential.h>

#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Tensors = PipelineStage::Tensors;
using Named = std::vector<std::pair<std::string, Tensor>>;

PipelineStage stage_of(const std::string& name, torch::nn::AnyModule module) {
  PipelineStage stage;
  for (const auto& each : module.ptr()->named_parameters())
    stage.parameters.emplace_back(name + "." + each.key(), each.value());
  stage.buffers = [name, all = module.ptr()] {
    Named buffers;
    for (const auto& each : all->named_buffers()) buffers.emplace_back(name + "." + each.key(), each.value());
    return buffers;
  };
  stage.run = [module](const Tensors& inputs) mutable -> Tensors {
    if (inputs.size() != 1)
      throw ConfigError("reef::Pipeline: a stage of a Sequential takes one tensor, and was given " +
                        std::to_string(inputs.size()) + "; make stages of your own for more.");
    return {module.forward(inputs.front())};
  };
  return stage;
}

}  // namespace

std::vector<PipelineStage> stages_of(const torch::nn::Sequential& modules) {
  std::vector<PipelineStage> stages;
  const auto children = modules->named_children();
  auto module = modules->begin();
  for (std::size_t i = 0; i < modules->size(); ++i) stages.push_back(stage_of(children[i].key(), *module++));
  return stages;
}

std::vector<Pipeline::Maker> makers_of(const std::vector<PipelineStage>& stages) {
  std::vector<Pipeline::Maker> makers;
  for (const PipelineStage& stage : stages) makers.emplace_back([stage] { return stage; });
  return makers;
}

NamesOfStages names_on_all_ranks(const StageNames& own, const ProcessGroupPtr& group) {
  std::string text;
  for (const auto& [stage, name] : own) text += std::to_string(stage) + " " + name + "\n";
  NamesOfStages all;
  for (const std::string& of_one : gather_texts(text, group, c10::kCPU)) {
    NamesOfStages of_rank;
    for (const std::string& line : lines_of(of_one))
      of_rank[static_cast<std::uint32_t>(std::stoul(line))].push_back(line.substr(line.find(' ') + 1));
    all.merge(of_rank);  // replicas have the same
  }
  return all;
}

ToldNames tell_names(const MadeStages& made, const ProcessGroupPtr& group) {
  constexpr char kParameter = 'p', kGives = 'g', kTakes = 't';  // before the names
  StageNames own;
  for (const auto& [number, stage] : made) {
    for (const auto& [name, parameter] : stage.parameters) own.emplace_back(number, kParameter + name);
    for (const std::string& name : stage.gives) own.emplace_back(number, kGives + name);
    for (const std::string& name : stage.takes) own.emplace_back(number, kTakes + name);
  }
  ToldNames told;
  for (const auto& [number, names] : names_on_all_ranks(own, group)) {
    for (const std::string& name : names) {
      NamesOfStages& of_kind = name.front() == kParameter ? told.parameters
                               : name.front() == kGives   ? told.gives
                                                          : told.takes;
      of_kind[number].push_back(name.substr(1));
    }
  }
  return told;
}

}  // namespace reef
