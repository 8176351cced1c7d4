#pragma once

#include "kernels/optim_step.h"

/// The same source, compiled for each instruction set. A function may be called only if the processor has the
/// instruction set.
namespace reef::kernels {

const OptimKernels& avx512_kernels();
const OptimKernels& avx2_kernels();
const OptimKernels& portable_kernels();

}  // namespace reef::kernels
