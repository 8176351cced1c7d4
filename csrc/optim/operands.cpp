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

OptimFormat format_of(OptimFormat asked, const Tensor& codes) {
  return codes.scalar_type() == at::kFloat ? OptimFormat::kFloat32 : asked;
}

kernels::OptimState state_of(const Subject& subject, const char* state, OptimFormat format,
                             const Tensor& codes, const Tensor& scales, std::int64_t elements,
                             c10::Device device) {
  if (!codes.is_contiguous() && format != OptimFormat::kFloat32 && format != OptimFormat::kBFloat16)
    refuse(subject, std::string("has codes of ") + state + " that are not contiguous");
  check_device(subject, codes, state, device);
  check_device(subject, scales, state, device);
  if (bytes_in(codes) != kernels::optim_codes_bytes(format, elements) ||
      bytes_in(scales) != kernels::optim_scales_bytes(format, elements)) {
    refuse(subject, "of " + std::to_string(elements) + " elements has a state " + state + " of " +
                        std::to_string(bytes_in(codes)) + " and " + std::to_string(bytes_in(scales)) +
                        " bytes, not " + std::to_string(kernels::optim_codes_bytes(format, elements)) +
                        " and " + std::to_string(kernels::optim_scales_bytes(format, elements)) + " (" +
                        std::string(name(format)) + "); load the state again, or begin anew");
  }
  return {bytes_of(codes), bytes_of(scales)};
}

}  // namespace reef::optim
