#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "reef/export.h"

namespace reef {

/// How many elements of `tensor` are NaN or infinite: float32, float64, float16, bfloat16; integers and bool
/// have none. Reads the tensor once and allocates nothing on the CPU (CUDA: 8 bytes); only a view with gaps
/// or overlaps is read through a contiguous copy. CUDA: runs on the current stream and waits for it. Also the
/// operator `reef::count_nonfinite(Tensor) -> int`. Throws ConfigError for other dtypes (complex, 8-bit
/// floats), layouts and devices, and for a CUDA tensor where Reef was built without CUDA.
REEF_API std::int64_t count_nonfinite(const at::Tensor& tensor);

}  // namespace reef
