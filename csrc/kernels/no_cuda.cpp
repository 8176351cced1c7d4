#include <ATen/core/Tensor.h>

#include "kernels/count_nonfinite.h"
#include "reef/error.h"

namespace reef::kernels::cuda {

std::int64_t count_nonfinite(const at::Tensor& tensor, FloatFormat) {
  throw ConfigError(
      "count_nonfinite: the tensor is on " + tensor.device().str() +
      " and this Reef was built without CUDA; build it with -DREEF_WITH_CUDA=ON or copy the tensor to "
      "the CPU");
}

}  // namespace reef::kernels::cuda
