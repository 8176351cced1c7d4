#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/optim_step.h"
#include "optim/hyper.h"

/// What the operators' tensors must be, and the raw memory of those that are.
namespace reef::optim {

/// Of whom a refusal speaks.
struct Subject {
  const char* op;
  std::int64_t parameter = -1;  ///< of a list; -1: there is none
};
/// Throws ConfigError: "<op>: <what>", "<op>: parameter <i> <what>".
[[noreturn]] void refuse(const Subject& subject, const std::string& what);

kernels::OptimDtype dtype_of(const Subject& subject, const at::Tensor& tensor, const char* what);
void check_dense(const Subject& subject, const at::Tensor& tensor, const char* what);
void check_device(const Subject& subject, const at::Tensor& tensor, const char* what, c10::Device device);

inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}
inline std::int64_t bytes_in(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

/// Element for element at the same place of memory.
bool same_layout(const at::Tensor& left, const at::Tensor& right);

/// A dense tensor by the dimension that is outermost in its memory.
kernels::OptimMatrix matrix_of(const at::Tensor& dense);

/// What a state of this parameter is kept in: kInt4Rank1 is kInt4 but for unsigned states of matrices.
kernels::OptimFormat format_for(kernels::OptimFormat asked, const at::Tensor& parameter, bool is_signed);
/// The same of one that is there: it says by its dtype whether it was kept in 32 bits although others are
/// not.
kernels::OptimFormat format_of(kernels::OptimFormat asked, const at::Tensor& codes,
                               const at::Tensor& parameter, bool is_signed);

at::ScalarType scale_dtype(kernels::OptimFormat format);

/// Codes and scales of a state of `parameter`, on `device`.
kernels::OptimState state_of(const Subject& subject, const char* name, kernels::OptimFormat format,
                             const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& parameter,
                             c10::Device device);

}  // namespace reef::optim
