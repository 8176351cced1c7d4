#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reef/category.h"
#include "reef/export.h"
#include "reef/timeline.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace reef {

/// The largest total that was alive at once, what it was made of, and the operator that was running.
struct Peak {
  CategoryBytes bytes;
  std::string op;  ///< "aten::mm", "aten::mm (backward)", or "" outside any operator
};

/// Counts every byte that LibTorch's allocators hand out, exactly, from its construction on.
///
/// CPU: a counting allocator in front of LibTorch's own, put there by the first Ledger of the process and
/// left for good. CUDA: the caching allocator's trace; bytes are those requested, before the allocator's
/// rounding. Not seen: storages that did not come from these allocators (from_blob, files mapped or shared
/// between processes, pinned host memory) and scratch that BLAS or oneDNN take from malloc.
///
/// Blocks born before the first Ledger are unknown until watch() or mark() meets them; then they are adopted.
/// Several ledgers may live at once: what is alive is the process's, peaks and timelines are each ledger's
/// own. Thread-safe. Cost: see `ledger` in benchmarks/RESULTS.md. Nothing here changes a tensor.
class REEF_API Ledger {
 public:
  Ledger();
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  /// Parameters and buffers of `module` become kParameter, their gradients kGradient when autograd has
  /// accumulated them. Call again after adding or unfreezing parameters.
  void watch(const torch::nn::Module& module);

  /// The same for tensors: `tensors` become kParameter, and the gradients of those that require grad
  /// kGradient.
  void watch(at::TensorList tensors);

  /// Tensors in the state of `optimizer` become kOptimizerState when its step first writes their parameter
  /// (at once for those that exist). Knows the optimizers of torch::optim; for another, mark() its tensors.
  /// `optimizer` must outlive this ledger.
  void watch(torch::optim::Optimizer& optimizer);

  /// The block behind `tensor` is of `category` from now on. Without effect on a storage that is not counted.
  void mark(const at::Tensor& tensor, Category category);

  /// Bytes alive now on `device`, by category.
  CategoryBytes live(c10::Device device = c10::kCPU) const;

  /// The largest total since construction or reset_peak().
  Peak peak(c10::Device device = c10::kCPU) const;

  /// The largest bytes of each category, each at its own moment: their sum can exceed peak().
  CategoryBytes peak_by_category(c10::Device device = c10::kCPU) const;

  /// Peaks begin anew from what is alive now.
  void reset_peak();

  /// Devices on which anything has been alive, CPU first.
  std::vector<c10::Device> devices() const;

  /// Records every change from now on, at 32 bytes a change, up to `max_events`; a recording under way is
  /// dropped.
  void start_timeline(std::size_t max_events = std::size_t{1} << 20);

  /// Ends the recording and gives it away. Throws ConfigError if none is under way.
  Timeline stop_timeline();

  /// A text table: per device and category bytes alive, at the peak of the sum, and the category's own peak.
  std::string table() const;

 private:
  class Books;
  std::unique_ptr<Books> books_;
};

/// Bytes that the counting allocator has handed out on the CPU and not got back, by a count of its own that
/// knows neither blocks nor categories: the second source of the truth that `Ledger::live().total()` tells. 0
/// before the first Ledger.
REEF_API std::int64_t allocator_live_bytes();

/// Blocks that this thread allocates while the scope lives are born as `category`, whatever operator runs.
class REEF_API CategoryScope {
 public:
  explicit CategoryScope(Category category);
  ~CategoryScope();
  CategoryScope(const CategoryScope&) = delete;
  CategoryScope& operator=(const CategoryScope&) = delete;

 private:
  std::uint8_t previous_;
};

}  // namespace reef
