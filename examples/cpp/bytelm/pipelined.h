#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model.h"
#include "reef/pipeline.h"

namespace bytelm {

/// A ByteGPT that is cut over ranks: the embedding, each block and the head are stages. Its states are those
/// of a whole ByteGPT. All ranks make the same calls.
class Pipelined {
 public:
  /// Takes the stages that this rank has from `model`. `windows`: like those of a micro-batch.
  Pipelined(const ByteGPT& model, const Options& options, const reef::ProcessGroupPtr& group,
            const torch::Tensor& windows);

  reef::Pipeline& pipeline() { return *pipeline_; }
  std::vector<std::string> names() const;
  /// This rank's stages.
  const std::vector<std::shared_ptr<torch::nn::Module>>& modules() const { return modules_; }

  /// Runs a step forward and backward. Returns the mean of next_byte_loss() over all micro-batches.
  torch::Tensor step(const torch::Tensor& windows);
  /// As in evaluate.h.
  double bits_per_byte(const torch::Tensor& text, const Options& options, torch::Device device);
  std::string sample(const Options& options, torch::Device device);

  /// A whole ByteGPT with the values of all ranks; on ranks other than 0 only if `on_all`.
  std::optional<ByteGPT> whole(const Options& options, bool on_all);
  void load(const ByteGPT& whole);

 private:
  /// On all ranks what the rank with the head has.
  torch::Tensor told_by_the_last(torch::Tensor known) const;

  reef::ProcessGroupPtr group_;
  std::int64_t micro_batches_, replicas_;
  std::optional<reef::Pipeline> pipeline_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

}  // namespace bytelm
