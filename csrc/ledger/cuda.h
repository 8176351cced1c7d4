#pragma once

namespace reef {

/// Counts CUDA blocks from now on, once in the process; does nothing where no CUDA device is present. Blocks
/// that the caching allocator had handed out before are not known. (Twins: cuda.cpp, no_cuda.cpp.)
void install_cuda_tracker();

}  // namespace reef
