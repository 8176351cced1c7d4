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

/// The kernels of one format. Each format has a source file of its own that includes this header, because
/// nvcc takes a minute to compile one format.
namespace reef::kernels::cuda {

namespace groups = cooperative_groups;

inline constexpr int kBlockThreads = 256;
inline constexpr int kWarps = kBlockThreads / warp::kThreads;
/// How many blocks are to fit on a multiprocessor at once. With four blocks, a thread has 64 registers.
inline constexpr int kBlocksAtOnce = 4;
/// The same for a rule and a format. If a thread holds too many values between the two halves of a step,
/// there are three blocks, with 80 registers for each thread, or two, with 128, so that no register is
/// spilled to memory (tests/device/test_kernel_resources.py). Values are counted in groups of four: a state
/// needs two.
template <class Rule, template <bool> class State>
constexpr int blocks_at_once() {
  if (State<false>::kBlocks == 0) return kBlocksAtOnce;
  constexpr bool kIsLamb = Rule::kStates == 2 && requires { &Rule::measured; };
  const int fours = 2 * Rule::kStates + kIsLamb + State<false>::kMoreFours;
  return fours <= 5 ? kBlocksAtOnce : fours <= 9 ? 3 : 2;
}

/// Copies a format's tables to `shared`, the shared memory in which the threads of a block look them up.
template <class Maps>
__device__ const Maps& shared_maps(const Maps& maps, std::byte* shared) {
  const auto* const from = reinterpret_cast<const std::byte*>(&maps);
  for (unsigned i = threadIdx.x; i < sizeof(Maps); i += kBlockThreads) shared[i] = from[i];
  __syncthreads();
  return *reinterpret_cast<const Maps*>(shared);
}

/// Calls `work(entry, first, last)` for each entry of which this block has pieces: they are the pieces
/// [first, last), numbered within the batch. A block's pieces are consecutive, so one search finds its first
/// entry. 32 bits are enough to number pieces and tiles: 2^31 tiles have more elements than a device has
/// bytes.
template <class Work>
__device__ void each_run(const OptimBatch& batch, const Work& work) {
  __shared__ int share[2];  // Not in registers, which are needed for elements.
  if (threadIdx.x < 2) {
    const std::int64_t block = blockIdx.x + std::int64_t{threadIdx.x};
    share[threadIdx.x] = static_cast<int>(batch.pieces * block / gridDim.x);
  }
  __syncthreads();
  const int piece = share[0];
  int at = 0;  // the last entry that begins at this piece or before it
  for (int end = batch.count; end - at > 1;) {
    const int middle = (at + end) / 2;
    if (batch.entries[middle].first_piece <= piece) {
      at = middle;
    } else {
      end = middle;
    }
  }
  const OptimEntry* const none = batch.entries + batch.count;
  for (const OptimEntry* entry = batch.entries + at; entry != none && entry->first_piece < share[1];
       ++entry) {
    const int first = static_cast<int>(entry->first_piece);
    const int end = first + static_cast<int>(pieces_of(entry->tensor.elements));
    work(*entry, share[0] > first ? share[0] : first, share[1] < end ? share[1] : end);
  }
}

/// Calls `work` with this thread's part of tile number `tile` of a tensor.
template <class Work>
__device__ void with_part(int tile, std::int64_t elements, bool aligned, const Work& work) {
  const int thread = static_cast<int>(threadIdx.x) % warp::kThreads;
  if (aligned && (tile + std::int64_t{1}) * kTileElements <= elements) {
    work(warp::Part<true>{tile, static_cast<int>(kTileElements), thread});
  } else {
    work(warp::part_of(tile, elements, thread));
  }
}

/// Calls `work` with this thread's parts of the pieces [first, last) of an entry, numbered within the batch.
/// The warps of the block take turns at the tiles.
template <class Rule, class Work>
__device__ void each_part(const OptimEntry& entry, int first, int last, const Work& work) {
  const auto tiles = static_cast<int>(tiles_of(entry.tensor.elements));
  const auto before = static_cast<int>(entry.first_piece);
  const int after = (last - before) * static_cast<int>(kPieceTiles);
  const int end = after < tiles ? after : tiles;
  int tile =
      (first - before) * static_cast<int>(kPieceTiles) + static_cast<int>(threadIdx.x) / warp::kThreads;
  for (; tile < end; tile += kWarps) {
    with_part(tile, entry.tensor.elements, warp::is_aligned<Rule>(entry.tensor), work);
  }
}

/// Calls `work` with this thread's parts of a tensor, whose tiles are distributed over all warps of the grid.
template <class Work>
__device__ void each_part(std::int64_t elements, bool aligned, const Work& work) {
  const auto end = static_cast<int>(tiles_of(elements));
  int tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / warp::kThreads;
  for (; tile < end; tile += static_cast<int>(gridDim.x) * kWarps) with_part(tile, elements, aligned, work);
}

/// Adds the counts of all threads of a warp to *to. Returns whether any of them is positive.
inline __device__ bool counted(int nonfinite, unsigned long long* to) {
  const auto all = groups::tiled_partition<warp::kThreads>(groups::this_thread_block());
  if (!all.any(nonfinite > 0)) return false;
  const int sum = groups::reduce(all, nonfinite, groups::plus<int>());
  if (all.thread_rank() == 0) atomicAdd(warp::global(to), static_cast<unsigned long long>(sum));
  return true;
}

/// Replaces each value by the largest among the threads that share a block of elements. The values are not
/// negative, so they are ordered like the integers that have the same bits.
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
__global__ void __launch_bounds__(kBlockThreads, blocks_at_once<Rule, State>())
    step_kernel(const __grid_constant__ OptimBatch batch, const __grid_constant__ warp::Maps<State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  const auto& maps = shared_maps(given, shared);
  each_run(batch, [&](const OptimEntry& entry, int first, int last) {
    constexpr bool kSurveyed = requires { &State<false>::template raise<true>; };
    if (kSurveyed && *entry.nonfinite > 0) return;  // The survey found it: the whole tensor is left as it is.
    each_part<Rule>(entry, first, last, [&]<bool kWhole>(const warp::Part<kWhole>& part) {
      using Step = warp::Step<Rule, State, kWhole>;
      constexpr int kLargest = Step::kStates * Step::kBlocks;
      Step step(entry.tensor, part, maps);
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
  });
}

template <class Rule, template <bool> class State>
__global__ void __launch_bounds__(kBlockThreads, blocks_at_once<Rule, State>())
    measure_kernel(const __grid_constant__ OptimBatch batch, OptimSquares* squares,
                   const __grid_constant__ warp::Maps<State> given) {
  using Sum = cub::BlockReduce<double, kBlockThreads>;
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  __shared__ typename Sum::TempStorage scratch[2];
  const auto& maps = shared_maps(given, shared);
  each_run(batch, [&](const OptimEntry& entry, int first, int last) {
    for (int piece = first; piece < last; ++piece) {
      OptimSquares own;
      each_part<Rule>(entry, piece, piece + 1, [&]<bool kWhole>(const warp::Part<kWhole>& part) {
        warp::Step<Rule, State, kWhole> step(entry.tensor, part, maps);
        const auto all = groups::tiled_partition<warp::kThreads>(groups::this_thread_block());
        if (all.any(step.nonfinite() > 0)) return;
        const OptimSquares of_tile = step.squares();
        own.parameter += of_tile.parameter;
        own.measured += of_tile.measured;
      });
      const OptimSquares sum{Sum(scratch[0]).Sum(own.parameter), Sum(scratch[1]).Sum(own.measured)};
      if (threadIdx.x == 0) squares[piece] = sum;
      __syncthreads();  // The scratch memory is used again for the next piece.
    }
  });
}

template <template <bool> class State, bool kSigned>
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    encode_kernel(const float* values, const __grid_constant__ OptimState state, std::int64_t elements,
                  const __grid_constant__ warp::Maps<State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  const auto& maps = shared_maps(given, shared);
  constexpr int kLargest = State<kSigned>::kBlocks;
  const bool aligned = warp::are_aligned(values, state.codes);
  each_part(elements, aligned, [&]<bool kWhole>(const warp::Part<kWhole>& part) {
    warp::Encode<State, kSigned, kWhole> encode(values, state, part, maps.template of<kSigned>());
    if constexpr (kLargest == 0) {
      encode.begin(nullptr);
      encode.end(nullptr);
    } else {
      float largest[kLargest];
      encode.begin(largest);
      exchange<State<kSigned>>(largest);
      encode.end(largest);
    }
  });
}

template <template <bool> class State, bool kSigned>
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    decode_kernel(const __grid_constant__ OptimState state, float* values, std::int64_t elements,
                  const __grid_constant__ warp::Maps<State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(warp::Maps<State>)];
  const auto& maps = shared_maps(given, shared);
  const bool aligned = warp::are_aligned(values, state.codes);
  each_part(elements, aligned, [&]<bool kWhole>(const warp::Part<kWhole>& part) {
    warp::decode<State, kSigned>(state, values, part, maps.template of<kSigned>());
  });
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
                  state, elements, warp::Maps<State>::all());
  };
  kernels.decode[kSigned] = [](const OptimState& state, float* values, std::int64_t elements,
                               cudaStream_t stream) {
    return launch(&decode_kernel<State, kSigned>, (tiles_of(elements) + kWarps - 1) / kWarps, stream, state,
                  values, elements, warp::Maps<State>::all());
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
