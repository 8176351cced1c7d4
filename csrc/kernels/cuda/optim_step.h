#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/optim_step.h"

/// The fused optimizer step on a CUDA device. A warp works on a tile; one launch steps many tensors whose
/// states have the same format. Everything runs asynchronously on the given stream of the current device.
namespace reef::kernels::cuda {

/// The number of tiles in a piece, which is the part of a tensor that a block of threads takes at once. Sums
/// are computed for each piece.
inline constexpr std::int64_t kPieceTiles = 16;
REEF_LANE constexpr std::int64_t pieces_of(std::int64_t elements) {
  return (elements + kPieceTiles * kTileElements - 1) / (kPieceTiles * kTileElements);
}

struct OptimEntry {
  OptimTensor tensor;             ///< all its memory is on the device
  std::int64_t first_piece;       ///< the number of pieces of all entries before this one
  unsigned long long* nonfinite;  ///< in device memory: counts gradient elements that are not finite
};

struct OptimBatch {
  const OptimEntry* entries = nullptr;  ///< in device memory
  int count = 0;
  std::int64_t pieces = 0;
};

using OptimCudaStep = cudaError_t (*)(const OptimBatch& batch, cudaStream_t stream);
/// Writes the sums of each piece of the batch to `squares`, which is in device memory.
using OptimCudaMeasure = cudaError_t (*)(const OptimBatch& batch, OptimSquares* squares, cudaStream_t stream);
using OptimCudaEncode = cudaError_t (*)(const float* values, const OptimState& state, std::int64_t elements,
                                        cudaStream_t stream);
using OptimCudaDecode = cudaError_t (*)(const OptimState& state, float* values, std::int64_t elements,
                                        cudaStream_t stream);

/// Replaces the scales of a kInt4Rank1 batch by the new ones, except for tensors in whose gradients the
/// survey found elements that are not finite.
using OptimCudaSettle = cudaError_t (*)(const OptimBatch& batch, cudaStream_t stream);

/// The kernels of one format. The last three exist for kInt4Rank1 only.
struct OptimCudaKernels {
  OptimCudaStep step[kOptimRules];
  OptimCudaMeasure measure[kOptimRules];  ///< nullptr if the rule needs no trust ratio
  OptimCudaEncode encode[2];              ///< [0]: unsigned, [1]: signed
  OptimCudaDecode decode[2];
  /// Finds the new scales before the step. The step leaves a tensor as it is if its survey counted any
  /// element that is not finite.
  OptimCudaStep survey[kOptimRules];
  OptimCudaEncode survey_values;
  OptimCudaSettle settle;
};
const OptimCudaKernels& optim_float32();
const OptimCudaKernels& optim_bfloat16();
const OptimCudaKernels& optim_int8();
const OptimCudaKernels& optim_int4();
const OptimCudaKernels& optim_companded8();
const OptimCudaKernels& optim_int8_compensated();
const OptimCudaKernels& optim_int4_compensated();
const OptimCudaKernels& optim_companded8_compensated();
const OptimCudaKernels& optim_int4_rank1();

}  // namespace reef::kernels::cuda
