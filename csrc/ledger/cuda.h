#pragma once

namespace reef {

/// Counts CUDA blocks from now on, once in the process; does nothing where no CUDA device is present, or
/// where the allocator is not LibTorch's caching one. Blocks that the caching allocator had handed out before
/// are not known. (Twins: cuda.cpp, no_cuda.cpp.)
void install_cuda_tracker();

}  // namespace reef
