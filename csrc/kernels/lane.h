#pragma once

/// Of functions that are formulas: for the lanes of a processor and, where CUDA is compiled, for its threads.
#ifdef __CUDACC__
#define REEF_LANE __host__ __device__ inline
#define REEF_UNROLL _Pragma("unroll")
#else
#define REEF_LANE inline
#define REEF_UNROLL
#endif
