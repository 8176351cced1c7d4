#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/autograd/function.h>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "pipeline_run/pass_tensors.h"
#include "pipeline_run/split_backward.h"
#include "pipeline_run/stage_run.h"
#include "pipeline_run/weights.h"
#include "reef/pipeline.h"

namespace reef {

/// The skips that a chunk takes from other chunks, and gives to them: their numbers, and the names by which
/// stages know them.
struct ChunkSkips {
  std::vector<std::pair<std::size_t, std::string>> takes = {}, gives = {};
};

/// A run of consecutive stages, with the graphs of the micro-batches between their forward and backward
/// passes. A graph begins at nodes that keep the gradients of the chunk's inputs, and ends at edges, so that
/// inputs and outputs themselves need not be kept.
class PipelineChunk {
 public:
  using Tensors = PipelineStage::Tensors;
  /// `recomputed`: runs of stages of the model, of which those of this chunk count.
  PipelineChunk(std::vector<PipelineStage> stages, std::uint32_t first_stage, ChunkSkips skips = {},
                const RecomputedRuns& recomputed = {});

  /// Runs the stages, each with generators that are seeded for it; afterwards generators are what they were.
  /// Throws what a stage throws, and ConfigError if a tensor of a skip is modified in place.
  PassTensors forward(std::uint32_t micro_batch, PassTensors input, PipelineSeed seed);
  /// Keeps the graph of `ends` for backward(): of the outputs, or of the loss. Throws ConfigError if it
  /// trains what is no parameter of the stages; of a call, its first micro-batch is checked.
  void keep(std::uint32_t micro_batch, const PassTensors& ends);
  /// Runs backward from the ends, which have these gradients, and returns the gradients of the inputs. The
  /// gradient of an input that backward does not reach is undefined. That of what was taken adds to a
  /// gradient that is given for it.
  PassTensors backward(std::uint32_t micro_batch, const PassTensors& gradients);
  /// Run backward in two halves, of which the second makes those gradients of weights that could wait.
  PassTensors backward_to_inputs(std::uint32_t micro_batch, const PassTensors& gradients);
  void backward_to_weights(std::uint32_t micro_batch);
  /// Where the stages compute: on the device of their first parameter.
  c10::Device device() const { return device_; }
  /// The parameters that are trained, each once.
  Tensors trained() const;
  /// Versions of the weights, for passes that use others than the newest; nullptr ends that.
  void use(PipelineWeights* weights) { weights_ = weights; }
  /// To be kept while a pass runs.
  PipelineWeights::Pass begin(PipelineAction::Kind kind, std::uint32_t micro_batch) const {
    return {weights_,
            kind == PipelineAction::Kind::kForward ? PipelineWeights::Of::kForward
                                                   : PipelineWeights::Of::kBackward,
            micro_batch};
  }
  /// Lets go of the graphs of all micro-batches.
  void forget();

 private:
  using NodePtr = decltype(torch::autograd::Edge::function);
  struct End {
    torch::autograd::Edge edge;  ///< not valid of one that has no graph
    c10::Device device = c10::kCPU;
  };
  struct Graph {
    std::vector<NodePtr> inputs;  ///< nullptr of those that want no gradient
    std::map<std::size_t, NodePtr> taken;
    torch::autograd::edge_list of_program;  ///< of inputs that keep their own graph
    std::vector<End> ends;
    std::map<std::size_t, End> given;

    /// Returns the edges at which a backward pass begins, and their gradients: of skips first, since stages
    /// that take them are behind those that use the outputs.
    std::pair<torch::autograd::edge_list, torch::autograd::variable_list> begin(
        const PassTensors& gradients) const;
    PassTensors take_gradients_of_inputs() const;
    std::vector<NodePtr> all_inputs() const;
  };
  Graph take(std::uint32_t micro_batch);

  bool is_first_;  ///< its inputs are the program's, and keep their own graph
  StageRun stages_;
  ChunkSkips skips_;
  std::unordered_set<const c10::TensorImpl*> declared_;  ///< parameters
  std::optional<std::uint32_t> first_micro_batch_;       ///< of each call, that this chunk has run forward
  c10::Device device_ = c10::kCPU;
  PipelineWeights* weights_ = nullptr;
  std::map<std::uint32_t, Graph> graphs_;          ///< by micro-batch
  std::map<std::uint32_t, SplitBackward> halves_;  ///< of backward passes, by micro-batch
};

}  // namespace reef
