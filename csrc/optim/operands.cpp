#include "optim/operands.h"

#include "optim/step.h"
#include "reef/error.h"

namespace reef::optim {

using at::Tensor;
using kernels::OptimDtype;
using kernels::OptimFormat;

void refuse(const Subject& subject, const std::string& what) {
  const std::string of = subject.parameter < 0 ? "" : "parameter " + std::to_string(subject.parameter) + " ";
  throw ConfigError(std::string(subject.op) + ": " + of + what);
}

OptimDtype dtype_of(const Subject& subject, const Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return OptimDtype::kFloat32;
    case at::kBFloat16:
      return OptimDtype::kBFloat16;
    case at::kHalf:
      return OptimDtype::kFloat16;
    default:
      refuse(subject, std::string("has ") + what + " of dtype " + c10::toString(tensor.scalar_type()) +
                          "; float32, bfloat16 and float16 are stepped");
  }
}

void check_dense(const Subject& subject, const Tensor& tensor, const char* what) {
  if (tensor.layout() != c10::kStrided || !tensor.is_non_overlapping_and_dense())
    refuse(subject, std::string("has ") + what + " that is sparse or has gaps; make it dense");
}

void check_device(const Subject& subject, const Tensor& tensor, const char* what, c10::Device device) {
  if (tensor.numel() == 0 || tensor.device() == device) return;
  refuse(subject, std::string("has ") + what + " on " + tensor.device().str() + ", not on " + device.str() +
                      "; move a model before its optimizer is made, and load states after that");
}

bool same_layout(const Tensor& left, const Tensor& right) {
  if (left.sizes() != right.sizes()) return false;
  for (std::int64_t i = 0; i < left.dim(); ++i) {
    if (left.size(i) > 1 && left.stride(i) != right.stride(i)) return false;
  }
  return true;
}

kernels::OptimMatrix matrix_of(const Tensor& dense) {
  const auto strides = dense.sym_strides();
  const auto sizes = dense.sym_sizes();
  kernels::OptimMatrix matrix{1, 1};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const std::int64_t size = sizes[i].guard_int(__FILE__, __LINE__);
    const std::int64_t stride = strides[i].guard_int(__FILE__, __LINE__);
    if (size > 1 && stride >= matrix.columns) matrix = {size, stride};
  }
  return matrix;
}

OptimFormat format_for(OptimFormat asked, const Tensor& parameter, bool is_signed) {
  if (asked != OptimFormat::kInt4Rank1) return asked;
  return !is_signed && has_rank1_scales(matrix_of(parameter)) ? asked : OptimFormat::kInt4;
}

OptimFormat format_of(OptimFormat asked, const Tensor& codes, const Tensor& parameter, bool is_signed) {
  if (codes.scalar_type() == at::kFloat) return OptimFormat::kFloat32;
  return format_for(asked, parameter, is_signed);
}

kernels::OptimState state_of(const Subject& subject, const char* state, OptimFormat format,
                             const Tensor& codes, const Tensor& scales, const Tensor& parameter,
                             c10::Device device) {
  const bool wide = format == OptimFormat::kFloat32 || format == OptimFormat::kBFloat16;
  if (!codes.is_contiguous() && !wide)
    refuse(subject, std::string("has codes of ") + state + " that are not contiguous");
  check_device(subject, codes, state, device);
  check_device(subject, scales, state, device);
  kernels::OptimState found{bytes_of(codes), bytes_of(scales)};
  if (format == OptimFormat::kInt4Rank1) found.matrix = matrix_of(parameter);
  const std::int64_t elements = parameter.numel();
  const std::int64_t code_bytes = kernels::optim_codes_bytes(format, elements);
  const std::int64_t scale_bytes = kernels::optim_scales_bytes(format, elements, found.matrix);
  if (bytes_in(codes) != code_bytes || bytes_in(scales) != scale_bytes) {
    refuse(subject, "of " + std::to_string(elements) + " elements has a state " + state + " of " +
                        std::to_string(bytes_in(codes)) + " and " + std::to_string(bytes_in(scales)) +
                        " bytes, not " + std::to_string(code_bytes) + " and " + std::to_string(scale_bytes) +
                        " (" + std::string(name(format)) + "); load the state again, or begin anew");
  }
  const at::ScalarType dtype = format == OptimFormat::kFloat32    ? at::kFloat
                               : format == OptimFormat::kBFloat16 ? at::kBFloat16
                                                                  : at::kByte;
  const bool scales_fit = scale_bytes == 0 || scales.scalar_type() == scale_dtype(format);
  if (codes.scalar_type() != dtype || !scales_fit || (wide && !same_layout(codes, parameter))) {
    refuse(subject, std::string("has a state ") + state + " of another dtype or layout than " +
                        std::string(name(format)) + " has for it; load the state again, or begin anew");
  }
  return found;
}

at::ScalarType scale_dtype(OptimFormat format) {
  return uncompensated(format) == OptimFormat::kCompanded8 ? at::kBFloat16 : at::kFloat;
}

}  // namespace reef::optim
