#include "pipeline_run/stages.h"

#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <utility>

#include "distributed/bytes_over_ranks.h"
#include "reef/error.h"

namespace reef {
namespace {

using at::Tensor;
using Tensors = PipelineStage::Tensors;
using Named = std::vector<std::pair<std::string, Tensor>>;

/// A stage of one tensor, with the parameters and buffers of these modules.
PipelineStage stage_of(const Chain::Modules& modules, std::function<Tensor(const Tensor&)> run) {
  PipelineStage stage;
  for (const auto& [name, module] : modules) {
    for (const auto& each : module->named_parameters())
      stage.parameters.emplace_back(name + "." + each.key(), each.value());
  }
  stage.buffers = [modules] {
    Named buffers;
    for (const auto& [name, module] : modules) {
      for (const auto& each : module->named_buffers())
        buffers.emplace_back(name + "." + each.key(), each.value());
    }
    return buffers;
  };
  stage.run = [run = std::move(run)](const Tensors& inputs) -> Tensors {
    if (inputs.size() != 1)
      throw ConfigError(
          "reef::Pipeline: a stage of a Sequential or a Chain takes one tensor, and was given " +
          std::to_string(inputs.size()) + "; make stages of your own for more.");
    return {run(inputs.front())};
  };
  return stage;
}

}  // namespace

std::vector<PipelineStage> stages_of(const torch::nn::Sequential& modules) {
  return stages_of(Chain(modules));
}

std::vector<PipelineStage> stages_of(const Chain& chain) {
  chain.check_current();
  std::vector<PipelineStage> stages;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (chain.modules(i).empty())
      throw ConfigError("reef::Pipeline: stage " + chain.name(i) +
                        " of the Chain does not say which parameters it has: add it with its module.");
    stages.push_back(stage_of(chain.modules(i), chain.function(i)));
  }
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
