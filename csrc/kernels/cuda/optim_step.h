#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/optim_step.h"

/// The fused step on a CUDA device: a warp works on a tile, one launch steps many tensors whose states are in
/// one format. Everything is asynchronous on the given stream of the current device.
namespace reef::kernels::cuda {

/// What a block of threads takes at once: so many tiles of one tensor. Sums are added up piece by piece.
inline constexpr std::int64_t kPieceTiles = 16;
REEF_LANE constexpr std::int64_t pieces_of(std::int64_t elements) {
  return (elements + kPieceTiles * kTileElements - 1) / (kPieceTiles * kTileElements);
}

struct OptimEntry {
  OptimTensor tensor;             ///< of memory on the device
  std::int64_t first_piece;       ///< of all pieces before it
  unsigned long long* nonfinite;  ///< on the device: takes the gradient's elements that are not finite
};

/// Entries on the device.
struct OptimBatch {
  const OptimEntry* entries = nullptr;
  int count = 0;
  std::int64_t pieces = 0;
};

using OptimCudaStep = cudaError_t (*)(const OptimBatch& batch, cudaStream_t stream);
/// Fills `squares`, on the device, for each piece.
using OptimCudaMeasure = cudaError_t (*)(const OptimBatch& batch, OptimSquares* squares, cudaStream_t stream);
using OptimCudaEncode = cudaError_t (*)(const float* values, const OptimState& state, std::int64_t elements,
                                        cudaStream_t stream);
using OptimCudaDecode = cudaError_t (*)(const OptimState& state, float* values, std::int64_t elements,
                                        cudaStream_t stream);

/// Makes the new scales of a batch of kInt4Rank1 its scales, where no gradient was found not to be finite.
using OptimCudaSettle = cudaError_t (*)(const OptimBatch& batch, cudaStream_t stream);

/// Of one format.
struct OptimCudaKernels {
  OptimCudaStep step[kOptimRules];
  OptimCudaMeasure measure[kOptimRules];  ///< nullptr: the rule needs no trust ratio
  OptimCudaEncode encode[2];              ///< [1]: signed
  OptimCudaDecode decode[2];
  OptimCudaStep
      survey[kOptimRules];  ///< kInt4Rank1: before the step, whose tensors are left if it counts any
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
