#pragma once

/// Of functions that are formulas: for the lanes of a processor and, where CUDA is compiled, for its threads.
#ifdef __CUDACC__
#define REEF_LANE __host__ __device__ inline
#define REEF_UNROLL _Pragma("unroll")
#else
#define REEF_LANE inline
#define REEF_UNROLL
#endif

/// An attribute of functions into which all that they call is to be inlined; the build sets it where it
/// optimizes.
#ifndef REEF_FLAT
#define REEF_FLAT
#endif
