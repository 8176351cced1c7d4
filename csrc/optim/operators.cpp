#include "optim/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "optim/step.h"
#include "page/pager.h"
#include "reef/error.h"

namespace reef::optim {
namespace {

using at::Tensor;
using kernels::OptimDtype;
using kernels::OptimFormat;
using kernels::OptimMaster;
using kernels::OptimRule;

[[noreturn]] void refuse(std::size_t index, const std::string& what) {
  throw ConfigError("optim_step_: parameter " + std::to_string(index) + " " + what);
}

OptimDtype dtype_of(std::size_t index, const Tensor& tensor, const char* what) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return OptimDtype::kFloat32;
    case at::kBFloat16:
      return OptimDtype::kBFloat16;
    case at::kHalf:
      return OptimDtype::kFloat16;
    default:
      refuse(index, std::string("has ") + what + " of dtype " + c10::toString(tensor.scalar_type()) +
                        "; float32, bfloat16 and float16 are stepped");
  }
}

void check_dense(std::size_t index, const Tensor& tensor, const char* what) {
  if (tensor.layout() != c10::kStrided || !tensor.is_non_overlapping_and_dense()) {
    refuse(index, std::string("has ") + what + " that is sparse or has gaps; make it dense");
  }
}

std::byte* bytes_of(const Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

std::int64_t bytes_in(const Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}

// A state says by its dtype whether it was kept in 32 bits although the others are not.
OptimFormat format_of(OptimFormat asked, const Tensor& codes) {
  return codes.scalar_type() == at::kFloat ? OptimFormat::kFloat32 : asked;
}

kernels::OptimState state_of(std::size_t index, const OptimStateName& state, OptimFormat format,
                             const Tensor& codes, const Tensor& scales, std::int64_t elements) {
  if (!codes.is_contiguous() && format != OptimFormat::kFloat32 && format != OptimFormat::kBFloat16)
    refuse(index, std::string("has codes of ") + state.name + " that are not contiguous");
  if (bytes_in(codes) != kernels::optim_codes_bytes(format, elements) ||
      bytes_in(scales) != kernels::optim_scales_bytes(format, elements)) {
    refuse(index, "of " + std::to_string(elements) + " elements has a state " + state.name + " of " +
                      std::to_string(bytes_in(codes)) + " and " + std::to_string(bytes_in(scales)) +
                      " bytes, not " + std::to_string(kernels::optim_codes_bytes(format, elements)) +
                      " and " + std::to_string(kernels::optim_scales_bytes(format, elements)) + " (" +
                      std::string(name(format)) + "); load the state again, or begin anew");
  }
  return {bytes_of(codes), bytes_of(scales)};
}

bool says_skip(const std::optional<Tensor>& found_inf) {
  return found_inf && found_inf->defined() && found_inf->item<float>() != 0;
}

Tensor optim_step(const std::string& rule_name, const std::string& state, const std::string& master,
                  at::TensorList parameters, at::TensorList gradients, at::TensorList states,
                  at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
                  const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
                  const std::optional<Tensor>& found_inf) {
  OptimHyper hyper = OptimHyper::of(numbers.vec());
  if (lr && lr->defined()) hyper.lr = lr->item<double>();
  const OptimRule rule = optim_rule(rule_name, hyper);
  const OptimFormat asked = optim_format(state);
  const OptimMaster kind = optim_master(master);
  const std::vector<OptimStateName> names = optim_states(rule);
  const std::size_t count = parameters.size();
  const bool has_masters = kernels::optim_master_bytes(kind) > 0;
  if (gradients.size() != count || steps.size() != count || states.size() != count * names.size() * 2 ||
      masters.size() != (has_masters ? count : 0)) {
    throw ConfigError("optim_step_: for " + std::to_string(count) + " parameters and rule " + rule_name +
                      " give as many gradients and steps, " + std::to_string(names.size() * 2) +
                      " states of each (codes, scales) and, for this kind, masters");
  }
  Tensor nonfinite = at::zeros({static_cast<std::int64_t>(count)}, at::kLong);
  if (says_skip(found_inf)) return nonfinite;
  const float gain = grad_scale && grad_scale->defined() ? 1 / grad_scale->item<float>() : 1;

  std::vector<OptimWork> works(count);
  for (std::size_t i = 0; i < count; ++i) {
    OptimWork& work = works[i];
    kernels::OptimTensor& tensor = work.tensor;
    const Tensor& parameter = parameters[i];
    check_dense(i, parameter, "memory");
    check_dense(i, gradients[i], "a gradient");
    if (gradients[i].sizes() != parameter.sizes() || gradients[i].strides() != parameter.strides())
      refuse(i,
             "has a gradient of another shape or layout; give grad.contiguous() in the parameter's layout");
    tensor.parameter_dtype = dtype_of(i, parameter, "values");
    tensor.gradient_dtype = dtype_of(i, gradients[i], "a gradient");
    tensor.parameter = bytes_of(parameter);
    tensor.gradient = static_cast<const std::byte*>(gradients[i].const_data_ptr());
    tensor.elements = parameter.numel();
    tensor.master_kind = tensor.parameter_dtype == OptimDtype::kFloat32 ? OptimMaster::kNone : kind;
    const std::int64_t master_bytes = kernels::optim_master_bytes(tensor.master_kind);
    if (master_bytes > 0) {
      if (bytes_in(masters[i]) != master_bytes * tensor.elements)
        refuse(i, "has master weights of another size; load the state again, or begin anew");
      tensor.master = bytes_of(masters[i]);
    }
    for (std::size_t k = 0; k < names.size(); ++k) {
      const Tensor& codes = states[(i * names.size() + k) * 2];
      const OptimFormat format = format_of(asked, codes);
      if (k > 0 && format != work.format) refuse(i, "has states in two formats");
      work.format = format;
      tensor.states[k] =
          state_of(i, names[k], format, codes, states[(i * names.size() + k) * 2 + 1], tensor.elements);
    }
    work.step = *static_cast<const float*>(steps[i].const_data_ptr()) + 1;
    tensor.key = static_cast<std::uint32_t>(static_cast<std::int64_t>(work.step)) * 0x9E3779B1U;
    tensor.constants.gradient = gain;
  }
  // All have been found sound: nothing is changed before.
  for (std::size_t i = 0; i < count; ++i) {
    *static_cast<float*>(steps[i].mutable_data_ptr()) = static_cast<float>(works[i].step);
  }
  step_on_cpu(rule, hyper, works);
  for (std::size_t i = 0; i < count; ++i) nonfinite.mutable_data_ptr<std::int64_t>()[i] = works[i].nonfinite;
  return nonfinite;
}

Tensor optim_step_meta(const std::string&, const std::string&, const std::string&, at::TensorList parameters,
                       at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::ArrayRef<double>,
                       const std::optional<Tensor>&, const std::optional<Tensor>&,
                       const std::optional<Tensor>&) {
  return at::empty({static_cast<std::int64_t>(parameters.size())},
                   at::TensorOptions().dtype(at::kLong).device(at::kMeta));
}

Tensor empty_like_scales(OptimFormat format, std::int64_t elements, c10::Device device) {
  const auto dtype = format == OptimFormat::kCompanded8 ? at::kBFloat16 : at::kFloat;
  const auto width = static_cast<std::int64_t>(c10::elementSize(dtype));
  return at::zeros({kernels::optim_scales_bytes(format, elements) / width},
                   at::TensorOptions().dtype(dtype).device(device));
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

std::tuple<Tensor, Tensor> optim_state(const Tensor& parameter, const std::string& state) {
  const OptimFormat format = optim_format(state);
  return {empty_like_codes(format, parameter),
          empty_like_scales(format, parameter.numel(), parameter.device())};
}

using Encoded = std::tuple<Tensor, Tensor>;

void optim_encode_out(const Tensor& values, const std::string& state, bool is_signed, Tensor& codes,
                      Tensor& scales) {
  const OptimFormat format = optim_format(state);
  check_dense(0, values, "values");
  if (values.scalar_type() != at::kFloat) refuse(0, "is to be encoded from float32");
  encode_on_cpu(format, is_signed, values.const_data_ptr<float>(),
                state_of(0, {"to encode", is_signed}, format, codes, scales, values.numel()), values.numel());
}

Encoded optim_encode(const Tensor& values, const std::string& state, bool is_signed) {
  auto [codes, scales] = optim_state(values, state);
  optim_encode_out(values, state, is_signed, codes, scales);
  return {codes, scales};
}

void optim_decode_out(const Tensor& codes, const Tensor& scales, const std::string& state, bool is_signed,
                      Tensor& out) {
  const OptimFormat format = format_of(optim_format(state), codes);
  check_dense(0, out, "memory to decode to");
  if (out.scalar_type() != at::kFloat) refuse(0, "is to be decoded to float32");
  const kernels::OptimState from = state_of(0, {"to decode", is_signed}, format, codes, scales, out.numel());
  decode_on_cpu(format, is_signed, from, out.mutable_data_ptr<float>(), out.numel());
}

Tensor optim_decode(const Tensor& codes, const Tensor& scales, const Tensor& like, const std::string& state,
                    bool is_signed) {
  Tensor out = at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kFloat));
  optim_decode_out(codes, scales, state, is_signed, out);
  return out;
}

// Without memory, and of sizes that may be symbols.
Encoded optim_state_meta(const Tensor& parameter, const std::string& state) {
  const OptimFormat format = optim_format(state);
  const auto wide = parameter.options().dtype(format == OptimFormat::kBFloat16 ? at::kBFloat16 : at::kFloat);
  const c10::SymInt tile = kernels::kTileElements;
  const c10::SymInt n = parameter.sym_numel();
  const auto made = [&](const c10::SymInt& codes, const c10::SymInt& block, at::ScalarType scale) {
    return Encoded{at::empty_symint({codes}, wide.dtype(at::kByte)),
                   at::empty_symint({(n + block - 1) / block}, wide.dtype(scale))};
  };
  switch (format) {
    case OptimFormat::kInt8:
      return made(n, tile, at::kFloat);
    case OptimFormat::kInt4:
      return made(n / tile * (tile / 2) + (n % tile).min(tile / 2), tile / 2, at::kFloat);
    case OptimFormat::kCompanded8:
      return made(n, 32, at::kBFloat16);
    case OptimFormat::kFloat32:
    case OptimFormat::kBFloat16:
      break;
  }
  return {at::empty_like(parameter, wide), at::empty_symint({0}, wide.dtype(at::kFloat))};
}

Encoded optim_encode_meta(const Tensor& values, const std::string& state, bool) {
  return optim_state_meta(values, state);
}

void optim_encode_out_meta(const Tensor&, const std::string&, bool, Tensor&, Tensor&) {}

Tensor optim_decode_meta(const Tensor&, const Tensor&, const Tensor& like, const std::string&, bool) {
  return at::empty_like(like, like.options().dtype(at::kFloat));
}

void optim_decode_out_meta(const Tensor&, const Tensor&, const std::string&, bool, Tensor&) {}

// Bytes of parameters that one call had best step: few calls, but small working sets where a budget is kept.
std::int64_t optim_slice_bytes() { return Pager::cpu().running() ? 0 : std::int64_t{64} << 20; }

std::vector<std::string> optim_state_names(const std::string& rule, at::ArrayRef<double> numbers) {
  std::vector<std::string> found;
  for (const OptimStateName& state : optim_states(rule, numbers.vec())) {
    found.push_back(std::string(state.is_signed ? "+-" : "+") + state.name);
  }
  return found;
}

}  // namespace
}  // namespace reef::optim

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "optim_step_(str rule, str state, str master, Tensor(a!)[] parameters, Tensor[] gradients, "
      "Tensor(b!)[] states, Tensor(c!)[] masters, Tensor(d!)[] steps, float[] numbers, Tensor? lr=None, "
      "Tensor? grad_scale=None, Tensor? found_inf=None) -> Tensor");
  m.def("optim_state(Tensor parameter, str state) -> (Tensor, Tensor)");
  m.def("optim_encode(Tensor values, str state, bool signed) -> (Tensor, Tensor)");
  m.def(
      "optim_encode.out(Tensor values, str state, bool signed, *, Tensor(a!) codes, Tensor(b!) scales) -> "
      "()");
  m.def("optim_decode(Tensor codes, Tensor scales, Tensor like, str state, bool signed) -> Tensor");
  m.def("optim_decode.out(Tensor codes, Tensor scales, str state, bool signed, *, Tensor(a!) out) -> ()");
  m.def("optim_slice_bytes() -> int", &reef::optim::optim_slice_bytes);
  m.def("optim_state_names(str rule, float[] numbers) -> str[]", &reef::optim::optim_state_names);
}

TORCH_LIBRARY_IMPL(reef, CPU, m) {
  m.impl("optim_step_", &reef::optim::optim_step);
  m.impl("optim_state", &reef::optim::optim_state);
  m.impl("optim_encode", &reef::optim::optim_encode);
  m.impl("optim_encode.out", &reef::optim::optim_encode_out);
  m.impl("optim_decode", &reef::optim::optim_decode);
  m.impl("optim_decode.out", &reef::optim::optim_decode_out);
}

TORCH_LIBRARY_IMPL(reef, Meta, m) {
  m.impl("optim_step_", &reef::optim::optim_step_meta);
  m.impl("optim_state", &reef::optim::optim_state_meta);
  m.impl("optim_encode", &reef::optim::optim_encode_meta);
  m.impl("optim_encode.out", &reef::optim::optim_encode_out_meta);
  m.impl("optim_decode", &reef::optim::optim_decode_meta);
  m.impl("optim_decode.out", &reef::optim::optim_decode_out_meta);
}

namespace reef::optim::ops {
namespace {

template <class Signature>
auto found(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

Tensor step(const std::string& rule, const std::string& state, const std::string& master,
            at::TensorList parameters, at::TensorList gradients, at::TensorList states,
            at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
            const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
            const std::optional<Tensor>& found_inf) {
  static const auto op = found<decltype(optim_step)>("reef::optim_step_");
  return op.call(rule, state, master, parameters, gradients, states, masters, steps, numbers, lr, grad_scale,
                 found_inf);
}

std::tuple<Tensor, Tensor> state(const Tensor& parameter, const std::string& state) {
  static const auto op = found<decltype(optim_state)>("reef::optim_state");
  return op.call(parameter, state);
}

std::tuple<Tensor, Tensor> encode(const Tensor& values, const std::string& state, bool is_signed) {
  static const auto op = found<decltype(optim_encode)>("reef::optim_encode");
  return op.call(values, state, is_signed);
}

Tensor decode(const Tensor& codes, const Tensor& scales, const Tensor& like, const std::string& state,
              bool is_signed) {
  static const auto op = found<decltype(optim_decode)>("reef::optim_decode");
  return op.call(codes, scales, like, state, is_signed);
}

std::int64_t slice_bytes() { return optim_slice_bytes(); }

}  // namespace reef::optim::ops
