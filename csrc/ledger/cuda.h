#pragma once

#include <c10/core/StorageImpl.h>

namespace reef {

/// Counts CUDA blocks from now on, once in the process; does nothing where no CUDA device is present, or
/// where the allocator is not LibTorch's caching one. (Twins: cuda.cpp, no_cuda.cpp.)
void install_cuda_tracker();

/// Counts a block that the caching allocator handed out before, by the bytes of its storage. Returns false if
/// `storage` has no such block.
bool adopt_cuda(c10::StorageImpl& storage);

}  // namespace reef
