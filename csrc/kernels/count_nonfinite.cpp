#include "kernels/count_nonfinite.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/parallel.h"
#include "reef/error.h"
#include "reef/numerics.h"

namespace reef {
namespace kernels {

std::optional<FloatFormat> float_format(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Half:
      return FloatFormat::kFloat16;
    case c10::ScalarType::BFloat16:
      return FloatFormat::kBFloat16;
    case c10::ScalarType::Float:
      return FloatFormat::kFloat32;
    case c10::ScalarType::Double:
      return FloatFormat::kFloat64;
    default:
      return std::nullopt;
  }
}

namespace cpu {
namespace {

template <class Bits>
bool is_nonfinite(const std::byte* element, Bits exponent) {
  Bits bits;
  std::memcpy(&bits, element, sizeof bits);
  return (bits & exponent) == exponent;
}

template <class Bits>
std::int64_t count(const std::byte* data, std::int64_t elements, Bits exponent) {
  std::int64_t found = 0;
  std::int64_t begin = 0;
  for (; begin + kBlockElements <= elements; begin += kBlockElements, data += kBlockElements * sizeof(Bits)) {
    // A counter as wide as an element, over a length the compiler knows: it vectorises at -O2, without
    // widening.
    Bits in_block = 0;
    for (std::int64_t i = 0; i < kBlockElements; ++i)
      in_block += is_nonfinite(data + i * sizeof(Bits), exponent);
    found += static_cast<std::int64_t>(in_block);
  }
  for (; begin < elements; ++begin, data += sizeof(Bits)) found += is_nonfinite(data, exponent);
  return found;
}

}  // namespace

std::int64_t count_nonfinite(const void* data, std::int64_t elements, FloatFormat format) {
  return with_exponent(format, [&](auto exponent) {
    std::atomic<std::int64_t> found{0};
    parallel_for(0, elements, kGrainElements, [&](std::int64_t begin, std::int64_t end) {
      const auto* first =
          static_cast<const std::byte*>(data) + begin * static_cast<std::int64_t>(sizeof exponent);
      found.fetch_add(count(first, end - begin, exponent), std::memory_order_relaxed);
    });
    return found.load();
  });
}

}  // namespace cpu
}  // namespace kernels

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& next_step) {
  throw ConfigError("count_nonfinite: " + what + "; " + next_step);
}

// Counts in a tensor on the CPU. One on CUDA is appended to `on_cuda`, to be counted with the others.
std::int64_t count_or_take(const at::Tensor& tensor,
                           std::map<c10::DeviceIndex, std::vector<at::Tensor>>& on_cuda) {
  if (!tensor.defined()) refuse("the tensor is undefined", "check defined() first");
  if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) return 0;
  const auto format = kernels::float_format(tensor);
  if (!format) {
    refuse(std::string("dtype ") + c10::toString(tensor.scalar_type()) + " is not read",
           "convert to one of float32, float64, float16, bfloat16 (complex: at::view_as_real)");
  }
  if (tensor.layout() != c10::kStrided) refuse("the tensor is not strided", "pass its values()");
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    refuse("device " + tensor.device().str() + " is not read", "copy the tensor to the CPU or to CUDA");
  }
  const at::NoGradGuard no_grad;
  // Counting does not mind the order, so transposed and channels-last tensors need no copy either.
  const bool dense = tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
  const at::Tensor values = dense ? tensor : tensor.contiguous();
  if (values.is_cuda()) {
    on_cuda[values.device().index()].push_back(values);
    return 0;
  }
  return kernels::cpu::count_nonfinite(values.const_data_ptr(), values.numel(), *format);
}

}  // namespace

std::int64_t count_nonfinite(const at::Tensor& tensor) {
  return kernels::count_nonfinite(std::vector<at::Tensor>{tensor});
}

std::int64_t kernels::count_nonfinite(const std::vector<at::Tensor>& tensors) {
  std::int64_t found = 0;
  std::map<c10::DeviceIndex, std::vector<at::Tensor>> on_cuda;
  for (const at::Tensor& tensor : tensors) found += count_or_take(tensor, on_cuda);
  for (const auto& [device, there] : on_cuda) found += cuda::count_nonfinite(there);
  return found;
}

}  // namespace reef
