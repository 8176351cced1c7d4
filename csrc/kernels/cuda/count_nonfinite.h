#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/count_nonfinite.h"

namespace reef::kernels::cuda {

/// Sets *found, which is in device memory, to how many of the `elements` at `data` are NaN or infinite. Runs
/// on `stream` of the current device and does not synchronize. `data` is aligned to the element size.
cudaError_t count_nonfinite(const void* data, std::int64_t elements, FloatFormat format,
                            unsigned long long* found, cudaStream_t stream);

}  // namespace reef::kernels::cuda
