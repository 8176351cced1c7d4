#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "reef/export.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace reef {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Collectives over lists of tensors, of any dense dtype and size, on the group's own backends. They return
/// when the result may be used (CUDA: by the current stream). If a rank is gone they throw RankFailed, which
/// names it and its host where that can be told; the tensors' contents are then undefined, the tensors
/// themselves whole. Memory: one flat communication buffer per dtype of at most `bucket_bytes` (one tensor
/// more, if that is larger).

enum class Reduction : std::uint8_t { kSum, kMean };

/// In what order contributions are added up.
enum class SumOrder : std::uint8_t {
  kRanks,   ///< ((0 + 1) + 2) + ..., whatever moves them: the same bits from every number of them onwards
  kNative,  ///< as the backend's own reduce-scatter or all-reduce does, which depends on the number of ranks
};

/// Every rank ends with the elementwise sum (or mean) over ranks. All ranks pass the same shapes and dtypes
/// in the same order; lists that hold a CPU tensor are compared first, by one small all-gather. Throws
/// ConfigError before anything is sent: on every rank if they disagree, and for sparse, quantized or expanded
/// tensors and the mean of integers. Integers wrap around; a sum of bools is true where any rank's is.
REEF_API void all_reduce(at::TensorList tensors, const ProcessGroupPtr& group,
                         Reduction reduction = Reduction::kSum,
                         std::int64_t bucket_bytes = std::int64_t{32} << 20);

/// Every rank ends with rank `root`'s values, byte for byte. Throws ConfigError as all_reduce does.
REEF_API void broadcast(at::TensorList tensors, const ProcessGroupPtr& group, int root = 0,
                        std::int64_t bucket_bytes = std::int64_t{32} << 20);

/// Returns once every rank has called it.
REEF_API void barrier(const ProcessGroupPtr& group);

}  // namespace reef
