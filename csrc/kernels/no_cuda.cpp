#include <ATen/core/Tensor.h>

#include "kernels/count_nonfinite.h"
#include "kernels/top_k.h"
#include "reef/error.h"

namespace reef::kernels::cuda {

std::int64_t count_nonfinite(const std::vector<at::Tensor>& tensors) {
  throw ConfigError(
      "count_nonfinite: the tensor is on " + tensors.front().device().str() +
      " and this Reef was built without CUDA; build it with -DREEF_WITH_CUDA=ON or copy the tensor to "
      "the CPU");
}

// Whoever compresses has refused such gradients before they came (check_device()).
std::vector<SparseEntry> take_largest(const at::Tensor& gradient, const at::Tensor&, const at::Tensor&,
                                      std::int64_t) {
  throw ConfigError("the largest elements are of a gradient on " + gradient.device().str() +
                    " and this Reef was built without CUDA; build it with -DREEF_WITH_CUDA=ON");
}

}  // namespace reef::kernels::cuda
