#pragma once

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

#include <algorithm>
#include <cub/block/block_reduce.cuh>

#include "kernels/cuda/grid.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/optim_step.h"
#include "kernels/optim_step/rules.h"
#include "kernels/optim_step/warp/step.h"

/// The kernels of one format: a source for each includes this, as nvcc takes a minute for one.
namespace reef::kernels::cuda {

namespace groups = cooperative_groups;

inline constexpr int kBlockThreads = 256;
inline constexpr int kWarps = kBlockThreads / warp::kThreads;

/// A format's tables, copied to where a block's threads look them up.
template <class Maps>
__device__ const Maps& shared_maps(const Maps& maps, std::byte* shared) {
  const auto* const from = reinterpret_cast<const std::byte*>(&maps);
  for (unsigned i = threadIdx.x; i < sizeof(Maps); i += kBlockThreads) shared[i] = from[i];
  __syncthreads();
  return *reinterpret_cast<const Maps*>(shared);
}

inline __device__ warp::Part part_of(std::int64_t tile, std::int64_t elements) {
  return warp::part_of(tile, elements, static_cast<int>(threadIdx.x % warp::kThreads));
}

/// Calls `work(entry, tile)` for the tiles of a piece that are this warp's.
template <class Work>
__device__ void each_tile(const OptimBatch& batch, std::int64_t piece, const Work& work) {
  int at = 0;  // the last entry that begins at this piece or before it
  for (int end = batch.count; end - at > 1;) {
    const int middle = (at + end) / 2;
    if (batch.entries[middle].first_piece <= piece) {
      at = middle;
    } else {
      end = middle;
    }
  }
  const OptimEntry& entry = batch.entries[at];
  const std::int64_t tiles = tiles_of(entry.tensor.elements);
  const std::int64_t first = (piece - entry.first_piece) * kPieceTiles;
  const std::int64_t last = first + kPieceTiles < tiles ? first + kPieceTiles : tiles;
  for (std::int64_t tile = first + threadIdx.x / warp::kThreads; tile < last; tile += kWarps)
    work(entry, tile);
}

/// Adds up what a warp's threads found, and says whether it is anything.
inline __device__ bool counted(int nonfinite, unsigned long long* to) {
  const auto all = groups::tiled_partition<warp::kThreads>(groups::this_thread_block());
  if (!all.any(nonfinite > 0)) return false;
  const int sum = groups::reduce(all, nonfinite, groups::plus<int>());
  if (all.thread_rank() == 0) atomicAdd(to, static_cast<unsigned long long>(sum));
  return true;
}

/// The largest of those that share a block. Sizes compare as the integers of their bits do.
template <class Of, int kCount>
__device__ void exchange(float (&largest)[kCount]) {
  const auto sharing = groups::tiled_partition<Of::kSharing>(groups::this_thread_block());
  REEF_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const unsigned bits = __float_as_uint(largest[i]);
    largest[i] = __uint_as_float(groups::reduce(sharing, bits, groups::greater<unsigned>()));
  }
}

template <class Rule, template <bool> class State>
__global__ void __launch_bounds__(kBlockThreads)
    step_kernel(const OptimBatch batch, const __grid_constant__ warp::Maps<State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  const auto& maps = shared_maps(given, shared);
  for (std::int64_t piece = blockIdx.x; piece < batch.pieces; piece += gridDim.x) {
    each_tile(batch, piece, [&](const OptimEntry& entry, std::int64_t tile) {
      using Step = warp::Step<Rule, State>;
      constexpr int kLargest = Step::kStates * Step::kBlocks;
      constexpr bool kSurveyed = requires { &State<false>::raise; };
      if (kSurveyed && *entry.nonfinite > 0) return;  // all of such a tensor is left
      Step step(entry.tensor, part_of(tile, entry.tensor.elements), maps);
      if (counted(step.nonfinite(), entry.nonfinite)) return;
      if constexpr (kLargest == 0) {
        step.begin(nullptr);
        step.end(nullptr);
      } else {
        float largest[kLargest];
        step.begin(largest);
        exchange<Step>(largest);
        step.end(largest);
      }
    });
  }
}

template <class Rule, template <bool> class State>
__global__ void __launch_bounds__(kBlockThreads)
    measure_kernel(const OptimBatch batch, OptimSquares* squares,
                   const __grid_constant__ warp::Maps<State> given) {
  using Sum = cub::BlockReduce<double, kBlockThreads>;
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  __shared__ typename Sum::TempStorage scratch[2];
  const auto& maps = shared_maps(given, shared);
  for (std::int64_t piece = blockIdx.x; piece < batch.pieces; piece += gridDim.x) {
    OptimSquares own;
    each_tile(batch, piece, [&](const OptimEntry& entry, std::int64_t tile) {
      warp::Step<Rule, State> step(entry.tensor, part_of(tile, entry.tensor.elements), maps);
      const auto all = groups::tiled_partition<warp::kThreads>(groups::this_thread_block());
      if (all.any(step.nonfinite() > 0)) return;
      const OptimSquares of_tile = step.squares();
      own.parameter += of_tile.parameter;
      own.measured += of_tile.measured;
    });
    const OptimSquares sum{Sum(scratch[0]).Sum(own.parameter), Sum(scratch[1]).Sum(own.measured)};
    if (threadIdx.x == 0) squares[piece] = sum;
    __syncthreads();  // before the scratch is used again
  }
}

template <template <bool> class State, bool kSigned>
__global__ void __launch_bounds__(kBlockThreads)
    encode_kernel(const float* values, const OptimState state, std::int64_t elements, std::int64_t tiles,
                  const __grid_constant__ warp::Maps<State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  const auto& maps = shared_maps(given, shared);
  constexpr int kLargest = State<kSigned>::kBlocks;
  for (std::int64_t tile = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / warp::kThreads; tile < tiles;
       tile += gridDim.x * std::int64_t{kWarps}) {
    warp::Encode<State, kSigned> encode(values, state, part_of(tile, elements), maps.template of<kSigned>());
    if constexpr (kLargest == 0) {
      encode.begin(nullptr);
      encode.end(nullptr);
    } else {
      float largest[kLargest];
      encode.begin(largest);
      exchange<State<kSigned>>(largest);
      encode.end(largest);
    }
  }
}

template <template <bool> class State, bool kSigned>
__global__ void __launch_bounds__(kBlockThreads)
    decode_kernel(const OptimState state, float* values, std::int64_t elements, std::int64_t tiles,
                  const __grid_constant__ warp::Maps<State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  const auto& maps = shared_maps(given, shared);
  for (std::int64_t tile = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / warp::kThreads; tile < tiles;
       tile += gridDim.x * std::int64_t{kWarps}) {
    warp::decode<State, kSigned>(state, values, part_of(tile, elements), maps.template of<kSigned>());
  }
}

template <class Kernel, class... Given>
cudaError_t launch(Kernel* kernel, std::int64_t blocks_wanted, cudaStream_t stream, const Given&... given) {
  int blocks = 0;
  if (const cudaError_t error =
          grid_for(reinterpret_cast<const void*>(kernel), kBlockThreads, blocks_wanted, blocks)) {
    return error;
  }
  REEF_LAUNCH(kernel, blocks, kBlockThreads, stream, given...);
  return cudaGetLastError();
}

template <template <bool> class State, bool kSigned>
void add_coding(OptimCudaKernels& kernels) {
  kernels.encode[kSigned] = [](const float* values, const OptimState& state, std::int64_t elements,
                               cudaStream_t stream) {
    return launch(&encode_kernel<State, kSigned>, (tiles_of(elements) + kWarps - 1) / kWarps, stream, values,
                  state, elements, tiles_of(elements), warp::Maps<State>::all());
  };
  kernels.decode[kSigned] = [](const OptimState& state, float* values, std::int64_t elements,
                               cudaStream_t stream) {
    return launch(&decode_kernel<State, kSigned>, (tiles_of(elements) + kWarps - 1) / kWarps, stream, state,
                  values, elements, tiles_of(elements), warp::Maps<State>::all());
  };
}

template <class Rule, template <bool> class State>
cudaError_t launch_step(const OptimBatch& batch, cudaStream_t stream) {
  return launch(&step_kernel<Rule, State>, batch.pieces, stream, batch, warp::Maps<State>::all());
}
template <class Rule, template <bool> class State>
cudaError_t launch_measure(const OptimBatch& batch, OptimSquares* squares, cudaStream_t stream) {
  return launch(&measure_kernel<Rule, State>, batch.pieces, stream, batch, squares, warp::Maps<State>::all());
}

template <class Rule, template <bool> class State>
void add_rule(OptimCudaKernels& kernels, OptimRule rule) {
  const auto r = static_cast<std::size_t>(rule);
  kernels.step[r] = &launch_step<Rule, State>;
  if constexpr (requires { &Rule::measured; }) kernels.measure[r] = &launch_measure<Rule, State>;
}

template <template <bool> class State, OptimFormat kFormat>
OptimCudaKernels all_kernels() {
  OptimCudaKernels kernels{};
  for_every_rule<warp::Lanes, rounds_as_torch(kFormat)>(
      [&]<class Rule>(OptimRule rule) { add_rule<Rule, State>(kernels, rule); });
  add_coding<State, false>(kernels);
  add_coding<State, true>(kernels);
  return kernels;
}

}  // namespace reef::kernels::cuda
