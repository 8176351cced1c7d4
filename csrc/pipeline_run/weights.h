#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/TensorImpl.h>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "reef/pipeline_versions.h"

namespace reef {

/// The versions of a chunk's weights that the passes of a schedule with updates use. Version v has the values
/// after v updates. An update of a version that later passes need makes a copy of it first, so what autograd
/// or a stage has kept of that version, also by views, stays as it was. Each version has counts of
/// modifications of its own, so that autograd's check for modified tensors holds for each of them.
class PipelineWeights {
 public:
  enum class Of : std::uint8_t { kForward, kBackward };

  /// `parameters`: those of the chunk that are trained, each once. `versions`: of each micro-batch.
  /// `passes_backward`: 2 where backward passes are split, or 1. `in_place`: each pass uses the newest
  /// version, which is the only one.
  PipelineWeights(std::vector<at::Tensor> parameters, std::vector<PipelineVersion> versions,
                  std::uint32_t passes_backward, bool in_place);
  /// In place: backward passes use what the weights were about `delay` updates before. See
  /// PipelineOptions::correction_decay.
  void correct(double delay, double decay);
  PipelineWeights(const PipelineWeights&) = delete;
  PipelineWeights& operator=(const PipelineWeights&) = delete;

  /// While it lives, the parameters are those of the version that a pass uses.
  class Pass {
   public:
    /// `weights` may be nullptr: then it does nothing.
    Pass(PipelineWeights* weights, Of of, std::uint32_t micro_batch);
    ~Pass();
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    PipelineWeights* weights_;
    std::uint32_t version_ = 0;
  };

  /// Calls `step`, which makes the next version of the parameters in place.
  void update(const std::function<void()>& step);
  /// Moves the newest version into the memory that the parameters had at first, and frees all others.
  void settle();

  std::uint32_t updates() const { return newest_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  /// What a parameter is in a version. `count`: of modifications.
  struct Value {
    at::Tensor data;
    c10::VariableVersion count;
  };
  using Values = std::vector<Value>;

  /// Modifies the parameters, which autograd is not to know.
  void modify(const std::function<void()>& work);
  Values values_now() const;
  void put(const Values& values);
  void let_go(std::uint32_t version);
  void use_corrected(bool corrected);

  std::vector<at::Tensor> parameters_;
  std::vector<PipelineVersion> versions_;
  bool in_place_;
  Values first_;
  std::uint32_t newest_ = 0;
  std::map<std::uint32_t, std::uint32_t> passes_left_;  ///< of each version
  std::map<std::uint32_t, Values> kept_;                ///< versions but for the newest
  Values newest_values_;                                ///< while a pass uses another version
  std::vector<Values> free_;                            ///< memory of versions that are no longer needed
  double delay_ = 0, follows_ = 0;                      ///< of correct(): the delay, and g
  std::vector<at::Tensor> d_, spare_;                   ///< of correct(), or empty
};

}  // namespace reef
