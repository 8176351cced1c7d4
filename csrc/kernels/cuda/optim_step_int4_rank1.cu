#include "kernels/cuda/optim_step.cuh"
#include "kernels/optim_step/warp/rank1.h"

namespace reef::kernels::cuda {
namespace {

template <class Rule>
__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    survey_kernel(const __grid_constant__ OptimBatch batch,
                  const __grid_constant__ warp::Maps<warp::Int4Rank1State> given) {
  alignas(16) __shared__ std::byte shared[sizeof(given)];
  const auto& maps = shared_maps(given, shared);
  each_run(batch, [&](const OptimEntry& entry, int first, int last) {
    each_part<Rule>(entry, first, last, [&]<bool kWhole>(const warp::Part<kWhole>& part) {
      warp::Step<Rule, warp::Int4Rank1State, kWhole> step(entry.tensor, part, maps);
      if (!counted(step.nonfinite(), entry.nonfinite)) step.survey();
    });
  });
}

__global__ void __launch_bounds__(kBlockThreads, kBlocksAtOnce)
    survey_values_kernel(const float* values, const __grid_constant__ OptimState state,
                         std::int64_t elements) {
  each_part(elements, warp::are_aligned(values),
            [&](const auto& part) { warp::survey(values, state, part); });
}

// A block of threads works on one tensor at a time.
__global__ void __launch_bounds__(kBlockThreads) settle_kernel(const __grid_constant__ OptimBatch batch) {
  for (int i = static_cast<int>(blockIdx.x); i < batch.count; i += static_cast<int>(gridDim.x)) {
    const OptimEntry& entry = batch.entries[i];
    if (*entry.nonfinite > 0) continue;
    for (const OptimState& state : entry.tensor.states) {
      auto* const scales = reinterpret_cast<float*>(state.scales);
      const std::int64_t count = state.matrix.rows + state.matrix.columns;
      for (std::int64_t k = threadIdx.x; k < count; k += kBlockThreads) scales[k] = state.new_scales[k];
    }
  }
}

template <class Rule>
cudaError_t launch_survey(const OptimBatch& batch, cudaStream_t stream) {
  return launch(&survey_kernel<Rule>, batch.pieces, stream, batch, warp::Maps<warp::Int4Rank1State>::all());
}

OptimCudaKernels all() {
  OptimCudaKernels kernels{};
  for_every_rule<warp::Lanes, false>([&]<class Rule>(OptimRule rule) {
    if constexpr (has_unsigned<Rule>()) {
      kernels.survey[static_cast<std::size_t>(rule)] = &launch_survey<Rule>;
      add_rule<Rule, warp::Int4Rank1State>(kernels, rule);
    }
  });
  add_coding<warp::Int4Rank1State, false>(kernels);
  kernels.survey_values = [](const float* values, const OptimState& state, std::int64_t elements,
                             cudaStream_t stream) {
    return launch(&survey_values_kernel, (tiles_of(elements) + kWarps - 1) / kWarps, stream, values, state,
                  elements);
  };
  kernels.settle = [](const OptimBatch& batch, cudaStream_t stream) {
    return launch(&settle_kernel, batch.count, stream, batch);
  };
  return kernels;
}

}  // namespace

const OptimCudaKernels& optim_int4_rank1() {
  static const OptimCudaKernels kernels = all();
  return kernels;
}

}  // namespace reef::kernels::cuda
