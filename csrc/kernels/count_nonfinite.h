#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace at {
class Tensor;
}  // namespace at

/// The ladder of one kernel: a reference that is plainly right, and the fast ones that must equal it. Raw
/// memory, no ATen, but for the CUDA rung's entrance.
namespace reef::kernels {

/// Floats that are NaN or infinite exactly where every bit of their exponent is set.
enum class FloatFormat : std::uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

/// A tensor's; nothing if its elements are of another dtype.
std::optional<FloatFormat> float_format(const at::Tensor& tensor);

/// Calls `function` with the exponent bits of `format`, in an unsigned integer as wide as an element.
template <class Function>
auto with_exponent(FloatFormat format, const Function& function) {
  switch (format) {
    case FloatFormat::kFloat16:
      return function(std::uint16_t{0x7C00});
    case FloatFormat::kBFloat16:
      return function(std::uint16_t{0x7F80});
    case FloatFormat::kFloat32:
      return function(std::uint32_t{0x7F800000});
    case FloatFormat::kFloat64:
      break;
  }
  return function(std::uint64_t{0x7FF0000000000000});
}

namespace reference {
/// One element at a time through std::isfinite. Not part of the library: the tests compile it.
std::int64_t count_nonfinite(const void* data, std::int64_t elements, FloatFormat format);
}  // namespace reference

namespace cpu {
inline constexpr std::int64_t kBlockElements = 1024;  ///< counted in lanes as narrow as an element
inline constexpr std::int64_t kGrainElements = std::int64_t{1} << 16;  ///< the least that is worth a thread
std::int64_t count_nonfinite(const void* data, std::int64_t elements, FloatFormat format);
}  // namespace cpu

namespace cuda {
/// Counts in all of these, which are dense tensors of floats on one device, for which the host waits once. A
/// build without CUDA throws ConfigError.
std::int64_t count_nonfinite(const std::vector<at::Tensor>& tensors);
}  // namespace cuda

/// Adds up reef::count_nonfinite() of all of these. The host waits once for each device.
std::int64_t count_nonfinite(const std::vector<at::Tensor>& tensors);

}  // namespace reef::kernels
