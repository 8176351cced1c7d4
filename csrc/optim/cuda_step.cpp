#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "kernels/cuda/optim_step.h"
#include "optim/step.h"

namespace reef::optim {
namespace {

using kernels::OptimFormat;
using kernels::OptimRule;
using kernels::OptimSquares;
using kernels::cuda::OptimBatch;
using kernels::cuda::OptimCudaKernels;
using kernels::cuda::OptimEntry;
using kernels::cuda::pieces_of;

const OptimCudaKernels& kernels_of(OptimFormat format) {
  switch (format) {
    case OptimFormat::kFloat32:
      return kernels::cuda::optim_float32();
    case OptimFormat::kBFloat16:
      return kernels::cuda::optim_bfloat16();
    case OptimFormat::kInt8:
      return kernels::cuda::optim_int8();
    case OptimFormat::kInt4:
      return kernels::cuda::optim_int4();
    case OptimFormat::kCompanded8:
      return kernels::cuda::optim_companded8();
    case OptimFormat::kInt8Compensated:
      return kernels::cuda::optim_int8_compensated();
    case OptimFormat::kInt4Compensated:
      return kernels::cuda::optim_int4_compensated();
    case OptimFormat::kCompanded8Compensated:
      return kernels::cuda::optim_companded8_compensated();
    case OptimFormat::kInt4Rank1:
      break;
  }
  return kernels::cuda::optim_int4_rank1();
}

/// Works of one format, by their places, and their entries on the device.
struct Batch {
  std::vector<std::size_t> places;
  at::Tensor entries;
  OptimBatch launched;
};

// Through page-locked memory, so that the copy is only queued.
void upload(Batch& batch, const std::vector<OptimWork>& works, std::int64_t* nonfinite, c10::Device device) {
  const auto bytes = static_cast<std::int64_t>(batch.places.size() * sizeof(OptimEntry));
  const at::Tensor pinned = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  auto* const entries = static_cast<OptimEntry*>(pinned.mutable_data_ptr());
  std::int64_t pieces = 0;
  for (std::size_t i = 0; i < batch.places.size(); ++i) {
    const OptimWork& work = works[batch.places[i]];
    auto* const found = reinterpret_cast<unsigned long long*>(nonfinite + batch.places[i]);
    new (entries + i) OptimEntry{work.tensor, pieces, found};
    pieces += pieces_of(work.tensor.elements);
  }
  batch.entries = pinned.to(device, /*non_blocking=*/true);
  batch.launched = {static_cast<const OptimEntry*>(batch.entries.const_data_ptr()),
                    static_cast<int>(batch.places.size()), pieces};
}

// The device adds up a piece, the host the pieces in their order.
void set_trusts(OptimRule rule, const OptimHyper& hyper, const OptimCudaKernels& kernels, const Batch& batch,
                std::vector<OptimWork>& works, c10::Device device, c10::cuda::CUDAStream stream) {
  const auto bytes = batch.launched.pieces * static_cast<std::int64_t>(sizeof(OptimSquares));
  const at::Tensor on_device = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  C10_CUDA_CHECK(kernels.measure[static_cast<std::size_t>(rule)](
      batch.launched, static_cast<OptimSquares*>(on_device.mutable_data_ptr()), stream));
  std::vector<OptimSquares> squares(static_cast<std::size_t>(batch.launched.pieces));
  c10::cuda::memcpy_and_sync(squares.data(), on_device.const_data_ptr(), bytes, cudaMemcpyDeviceToHost,
                             stream);
  auto piece = squares.begin();
  for (const std::size_t place : batch.places) {
    OptimSquares sum;
    for (const auto end = piece + pieces_of(works[place].tensor.elements); piece != end; ++piece) {
      sum.parameter += piece->parameter;
      sum.measured += piece->measured;
    }
    set_trust(rule, hyper, sum, works[place]);
  }
}

}  // namespace

void step_on_cuda(c10::Device device, OptimRule rule, const OptimHyper& hyper, std::vector<OptimWork>& works,
                  std::int64_t* nonfinite) {
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor new_scales =
      at::zeros({new_scales_of(works)}, at::TensorOptions().dtype(at::kFloat).device(device));
  set_new_scales(works, new_scales.mutable_data_ptr<float>());
  Batch batches[kernels::kOptimFormats];
  for (std::size_t i = 0; i < works.size(); ++i) {
    if (works[i].tensor.elements == 0) continue;
    set_constants(rule, hyper, works[i]);
    batches[static_cast<std::size_t>(works[i].format)].places.push_back(i);
  }
  for (int format = 0; format < kernels::kOptimFormats; ++format) {
    Batch& batch = batches[format];
    if (batch.places.empty()) continue;
    const OptimCudaKernels& kernels = kernels_of(static_cast<OptimFormat>(format));
    upload(batch, works, nonfinite, device);
    if (kernels.measure[static_cast<std::size_t>(rule)] != nullptr) {
      set_trusts(rule, hyper, kernels, batch, works, device, stream);
      upload(batch, works, nonfinite, device);
    }
    const auto r = static_cast<std::size_t>(rule);
    if (kernels.survey[r] != nullptr) C10_CUDA_CHECK(kernels.survey[r](batch.launched, stream));
    C10_CUDA_CHECK(kernels.step[r](batch.launched, stream));
    if (kernels.survey[r] != nullptr) C10_CUDA_CHECK(kernels.settle(batch.launched, stream));
  }
}

void encode_on_cuda(c10::Device device, OptimFormat format, bool is_signed, const float* values,
                    const kernels::OptimState& state, std::int64_t elements) {
  if (elements == 0) return;
  const c10::cuda::CUDAGuard guard(device);
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream();
  const OptimCudaKernels& kernels = kernels_of(format);
  kernels::OptimState to = state;
  if (kernels.survey_values != nullptr) {
    to.new_scales = reinterpret_cast<float*>(state.scales);
    const auto bytes = static_cast<std::size_t>(state.matrix.rows + state.matrix.columns) * sizeof(float);
    C10_CUDA_CHECK(cudaMemsetAsync(to.new_scales, 0, bytes, stream));
    C10_CUDA_CHECK(kernels.survey_values(values, to, elements, stream));
  }
  C10_CUDA_CHECK(kernels.encode[is_signed](values, to, elements, stream));
}

void decode_on_cuda(c10::Device device, OptimFormat format, bool is_signed, const kernels::OptimState& state,
                    float* values, std::int64_t elements) {
  if (elements == 0) return;
  const c10::cuda::CUDAGuard guard(device);
  C10_CUDA_CHECK(
      kernels_of(format).decode[is_signed](state, values, elements, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace reef::optim
