#pragma once

#include "kernels/optim_step.h"

/// One source, compiled for each instruction set; to be called only where the processor has it.
namespace reef::kernels {

const OptimKernels& avx512_kernels();
const OptimKernels& avx2_kernels();
const OptimKernels& portable_kernels();

}  // namespace reef::kernels
