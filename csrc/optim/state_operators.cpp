#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "optim/operands.h"
#include "optim/operators.h"
#include "optim/step.h"
#include "reef/part.h"
#include "typed_operator.h"

namespace reef::optim {
namespace {

using at::Tensor;
using kernels::OptimFormat;

Tensor empty_like_scales(OptimFormat format, const Tensor& like) {
  const at::ScalarType dtype = scale_dtype(format);
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  const kernels::OptimMatrix matrix =
      format == OptimFormat::kInt4Rank1 ? matrix_of(like) : kernels::OptimMatrix{};
  return at::zeros({kernels::optim_scales_bytes(format, like.numel(), matrix) / width},
                   at::TensorOptions().dtype(dtype).device(like.device()));
}

// Codes as wide as the parameter keep its shape and layout.
Tensor empty_like_codes(OptimFormat format, const Tensor& like) {
  const at::TensorOptions options = at::TensorOptions().device(like.device());
  if (format == OptimFormat::kFloat32 || format == OptimFormat::kBFloat16) {
    return at::empty_strided(like.sizes(), like.strides(),
                             options.dtype(format == OptimFormat::kFloat32 ? at::kFloat : at::kBFloat16))
        .zero_();
  }
  return at::zeros({kernels::optim_codes_bytes(format, like.numel())}, options.dtype(at::kByte));
}

std::tuple<Tensor, Tensor> optim_state(const Tensor& parameter, const std::string& state, bool is_signed) {
  const OptimFormat asked = optim_format(state);
  if (asked == OptimFormat::kInt4Rank1 && part_of(parameter)) {
    refuse({"optim_state"},
           "int4_rank1 has scales for whole rows and columns, and this is a part of a parameter; take int4");
  }
  const OptimFormat format = format_for(asked, parameter, is_signed);
  return {empty_like_codes(format, parameter), empty_like_scales(format, parameter)};
}

using Encoded = std::tuple<Tensor, Tensor>;

void optim_encode_out(const Tensor& values, const std::string& state, bool is_signed, Tensor& codes,
                      Tensor& scales) {
  const Subject subject{"optim_encode"};
  check_dense(subject, values, "values");
  const OptimFormat format = format_for(optim_format(state), values, is_signed);
  if (values.scalar_type() != at::kFloat) refuse(subject, "values are encoded from float32");
  const c10::Device device = values.device();
  kernels::OptimState to = state_of(subject, "to encode", format, codes, scales, values, device);
  if (const std::optional<Part> part = part_of(values)) to.first = part->first;
  if (device.is_cuda()) {
    encode_on_cuda(device, format, is_signed, values.const_data_ptr<float>(), to, values.numel());
  } else {
    encode_on_cpu(format, is_signed, values.const_data_ptr<float>(), to, values.numel());
  }
}

Encoded optim_encode(const Tensor& values, const std::string& state, bool is_signed) {
  auto [codes, scales] = optim_state(values, state, is_signed);
  optim_encode_out(values, state, is_signed, codes, scales);
  return {codes, scales};
}

void optim_decode_out(const Tensor& codes, const Tensor& scales, const std::string& state, bool is_signed,
                      Tensor& out) {
  const Subject subject{"optim_decode"};
  check_dense(subject, out, "memory to decode to");
  const OptimFormat format = format_of(optim_format(state), codes, out, is_signed);
  if (out.scalar_type() != at::kFloat) refuse(subject, "states are decoded to float32");
  const c10::Device device = out.device();
  const kernels::OptimState from = state_of(subject, "to decode", format, codes, scales, out, device);
  if (device.is_cuda()) {
    decode_on_cuda(device, format, is_signed, from, out.mutable_data_ptr<float>(), out.numel());
  } else {
    decode_on_cpu(format, is_signed, from, out.mutable_data_ptr<float>(), out.numel());
  }
}

Tensor optim_decode(const Tensor& codes, const Tensor& scales, const Tensor& like, const std::string& state,
                    bool is_signed) {
  Tensor out = at::empty_like(like, like.options().dtype(at::kFloat));
  optim_decode_out(codes, scales, state, is_signed, out);
  return out;
}

// Without memory, and of sizes that may be symbols.
Encoded optim_state_meta(const Tensor& parameter, const std::string& state, bool is_signed) {
  const OptimFormat format = format_for(optim_format(state), parameter, is_signed);
  const auto wide = parameter.options().dtype(format == OptimFormat::kBFloat16 ? at::kBFloat16 : at::kFloat);
  const c10::SymInt tile = kernels::kTileElements;
  const c10::SymInt n = parameter.sym_numel();
  const c10::SymInt pairs = n / tile * (tile / 2) + (n % tile).min(tile / 2);
  const auto made = [&](const c10::SymInt& codes, const c10::SymInt& scales, at::ScalarType scale) {
    const c10::SymInt rests = uncompensated(format) == format ? c10::SymInt(0) : pairs;
    return Encoded{at::empty_symint({codes + rests}, wide.dtype(at::kByte)),
                   at::empty_symint({scales}, wide.dtype(scale))};
  };
  const auto blocks = [&](const c10::SymInt& of) { return (n + of - 1) / of; };
  switch (uncompensated(format)) {
    case OptimFormat::kInt8:
      return made(n, blocks(tile), at::kFloat);
    case OptimFormat::kInt4:
      return made(pairs, blocks(tile / 2), at::kFloat);
    case OptimFormat::kInt4Rank1: {
      const kernels::OptimMatrix matrix = matrix_of(parameter);
      return made(pairs, matrix.rows + matrix.columns, at::kFloat);
    }
    case OptimFormat::kCompanded8:
      return made(n, blocks(32), at::kBFloat16);
    default:
      return {at::empty_like(parameter, wide), at::empty_symint({0}, wide.dtype(at::kFloat))};
  }
}

Encoded optim_encode_meta(const Tensor& values, const std::string& state, bool is_signed) {
  return optim_state_meta(values, state, is_signed);
}

void optim_encode_out_meta(const Tensor&, const std::string&, bool, Tensor&, Tensor&) {}

Tensor optim_decode_meta(const Tensor&, const Tensor&, const Tensor& like, const std::string&, bool) {
  return at::empty_like(like, like.options().dtype(at::kFloat));
}

void optim_decode_out_meta(const Tensor&, const Tensor&, const std::string&, bool, Tensor&) {}

}  // namespace
}  // namespace reef::optim

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("optim_state(Tensor parameter, str state, bool signed) -> (Tensor, Tensor)");
  m.def("optim_encode(Tensor values, str state, bool signed) -> (Tensor, Tensor)");
  m.def(
      "optim_encode.out(Tensor values, str state, bool signed, *, Tensor(a!) codes, Tensor(b!) scales) -> "
      "()");
  m.def("optim_decode(Tensor codes, Tensor scales, Tensor like, str state, bool signed) -> Tensor");
  m.def("optim_decode.out(Tensor codes, Tensor scales, str state, bool signed, *, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(reef, CPU, m) {
  m.impl("optim_state", &reef::optim::optim_state);
  m.impl("optim_encode", &reef::optim::optim_encode);
  m.impl("optim_encode.out", &reef::optim::optim_encode_out);
  m.impl("optim_decode", &reef::optim::optim_decode);
  m.impl("optim_decode.out", &reef::optim::optim_decode_out);
}

TORCH_LIBRARY_IMPL(reef, CUDA, m) {
  m.impl("optim_state", &reef::optim::optim_state);
  m.impl("optim_encode", &reef::optim::optim_encode);
  m.impl("optim_encode.out", &reef::optim::optim_encode_out);
  m.impl("optim_decode", &reef::optim::optim_decode);
  m.impl("optim_decode.out", &reef::optim::optim_decode_out);
}

TORCH_LIBRARY_IMPL(reef, Meta, m) {
  m.impl("optim_state", &reef::optim::optim_state_meta);
  m.impl("optim_encode", &reef::optim::optim_encode_meta);
  m.impl("optim_encode.out", &reef::optim::optim_encode_out_meta);
  m.impl("optim_decode", &reef::optim::optim_decode_meta);
  m.impl("optim_decode.out", &reef::optim::optim_decode_out_meta);
}

namespace reef::optim::ops {

std::tuple<Tensor, Tensor> state(const Tensor& parameter, const std::string& state, bool is_signed) {
  static const auto op = typed_operator<decltype(optim_state)>("reef::optim_state");
  return op.call(parameter, state, is_signed);
}

std::tuple<Tensor, Tensor> encode(const Tensor& parameter, const Tensor& values, const std::string& state,
                                  bool is_signed) {
  static const auto op = typed_operator<decltype(optim_encode)>("reef::optim_encode");
  if (const std::optional<Part> part = part_of(parameter)) set_part(values, *part);
  return op.call(values, state, is_signed);
}

Tensor decode(const Tensor& codes, const Tensor& scales, const Tensor& like, const std::string& state,
              bool is_signed) {
  static const auto op = typed_operator<decltype(optim_decode)>("reef::optim_decode");
  return op.call(codes, scales, like, state, is_signed);
}

}  // namespace reef::optim::ops
