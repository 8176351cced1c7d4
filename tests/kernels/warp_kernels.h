#pragma once

#include "kernels/optim_step.h"

namespace reef::kernels {

/// What a warp does, thread by thread, as kernels like any others: the CUDA kernels but for their launch and
/// the exchange between threads. Sums of squares are added up in another order than the others'.
const OptimKernels& warp_kernels();

}  // namespace reef::kernels
