#include "optim/operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>
#include <string>
#include <vector>

#include "kernels/optim_step/rounding.h"
#include "optim/operands.h"
#include "optim/step.h"
#include "page/pager.h"
#include "reef/error.h"
#include "reef/part.h"
#include "typed_operator.h"

namespace reef::optim {
namespace {

using at::Tensor;
using kernels::OptimDtype;
using kernels::OptimFormat;
using kernels::OptimMaster;
using kernels::OptimRule;

bool says_skip(const std::optional<Tensor>& found_inf) {
  return found_inf && found_inf->defined() && found_inf->item<float>() != 0;
}

Tensor optim_step(const std::string& rule_name, const std::string& state, const std::string& master,
                  at::TensorList parameters, at::TensorList gradients, at::TensorList states,
                  at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
                  const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
                  const std::optional<Tensor>& found_inf, at::IntArrayRef begins) {
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
  const c10::Device device = count == 0 ? c10::Device(at::kCPU) : parameters[0].device();
  const at::TensorOptions counters = at::TensorOptions().dtype(at::kLong).device(device);
  Tensor nonfinite = at::zeros({static_cast<std::int64_t>(count)}, counters);
  if (says_skip(found_inf)) return nonfinite;
  const float gain = grad_scale && grad_scale->defined() ? 1 / grad_scale->item<float>() : 1;

  std::vector<OptimWork> works(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Subject subject{"optim_step_", static_cast<std::int64_t>(i)};
    OptimWork& work = works[i];
    kernels::OptimTensor& tensor = work.tensor;
    const Tensor& parameter = parameters[i];
    check_dense(subject, parameter, "memory");
    check_dense(subject, gradients[i], "a gradient");
    check_device(subject, parameter, "memory", device);
    check_device(subject, gradients[i], "a gradient", device);
    check_device(subject, steps[i], "a count of steps", at::kCPU);
    if (steps[i].scalar_type() != at::kFloat || steps[i].numel() != 1)
      refuse(subject,
             "has a count of steps that is not one number of float32; give torch.tensor(float(step))");
    if (gradients[i].sizes() != parameter.sizes() || gradients[i].strides() != parameter.strides()) {
      refuse(subject,
             "has a gradient of another shape or layout; give grad.contiguous() in the parameter's layout");
    }
    tensor.parameter_dtype = dtype_of(subject, parameter, "values");
    tensor.gradient_dtype = dtype_of(subject, gradients[i], "a gradient");
    tensor.parameter = bytes_of(parameter);
    tensor.gradient = static_cast<const std::byte*>(gradients[i].const_data_ptr());
    tensor.elements = parameter.numel();
    tensor.master_kind = tensor.parameter_dtype == OptimDtype::kFloat32 ? OptimMaster::kNone : kind;
    if (kernels::optim_master_bytes(tensor.master_kind) > 0) {
      check_device(subject, masters[i], "master weights", device);
      const auto dtype = tensor.master_kind == OptimMaster::kFloat32 ? at::kFloat : at::kByte;
      if (masters[i].scalar_type() != dtype || !same_layout(masters[i], parameter))
        refuse(subject,
               "has master weights of another size, dtype or layout; load the state again, or begin anew");
      tensor.master = bytes_of(masters[i]);
    }
    for (std::size_t k = 0; k < names.size(); ++k) {
      const Tensor& codes = states[(i * names.size() + k) * 2];
      const Tensor& scales = states[(i * names.size() + k) * 2 + 1];
      const OptimFormat format = format_of(asked, codes, parameter, names[k].is_signed);
      const bool wide = format == OptimFormat::kFloat32;
      if (k > 0 && wide != (work.format == OptimFormat::kFloat32))
        refuse(subject, "has states in two formats");
      if (k == 0 || format == OptimFormat::kInt4Rank1) work.format = format;
      tensor.states[k] = state_of(subject, names[k].name, format, codes, scales, parameter, device);
    }
    work.step = *static_cast<const float*>(steps[i].const_data_ptr()) + 1;
    const std::optional<Part> part = part_of(parameter);
    if (part && needs_norms(rule)) {
      refuse(subject, "is a part of one of " + std::to_string(part->whole_elements) +
                          " elements, whose norm " + rule_name +
                          " needs; shard by stage \"replicate\", or take a rule without norms");
    }
    tensor.key = kernels::key_of_tensor(static_cast<std::int64_t>(work.step), part ? part->first : 0);
    tensor.constants.gradient = gain;
  }
  for (const std::int64_t i : begins) {
    if (i < 0 || i >= static_cast<std::int64_t>(count))
      throw ConfigError("optim_step_: the momentum of parameter " + std::to_string(i) + " begins, of " +
                        std::to_string(count));
    works[static_cast<std::size_t>(i)].begins = true;
  }
  // All have been found sound: nothing is changed before.
  for (std::size_t i = 0; i < count; ++i) {
    *static_cast<float*>(steps[i].mutable_data_ptr()) = static_cast<float>(works[i].step);
  }
  auto* const found = nonfinite.mutable_data_ptr<std::int64_t>();
  if (device.is_cuda()) {
    step_on_cuda(device, rule, hyper, works, found);
  } else {
    step_on_cpu(rule, hyper, works, found);
  }
  return nonfinite;
}

Tensor optim_step_meta(const std::string&, const std::string&, const std::string&, at::TensorList parameters,
                       at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::ArrayRef<double>,
                       const std::optional<Tensor>&, const std::optional<Tensor>&,
                       const std::optional<Tensor>&, at::IntArrayRef) {
  return at::empty({static_cast<std::int64_t>(parameters.size())},
                   at::TensorOptions().dtype(at::kLong).device(at::kMeta));
}

// Few calls, but small working sets where a budget is kept; on a device, one launch.
std::int64_t optim_slice_bytes(c10::Device device) {
  if ((device.is_cpu() || device.is_cuda()) && Pager::of(device).running()) return 0;
  return device.is_cuda() ? std::numeric_limits<std::int64_t>::max() : std::int64_t{64} << 20;
}

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
      "Tensor? grad_scale=None, Tensor? found_inf=None, int[] begins=[]) -> Tensor");
  m.def("optim_slice_bytes(Device device) -> int", &reef::optim::optim_slice_bytes);
  m.def("optim_state_names(str rule, float[] numbers) -> str[]", &reef::optim::optim_state_names);
}

TORCH_LIBRARY_IMPL(reef, CPU, m) { m.impl("optim_step_", &reef::optim::optim_step); }
TORCH_LIBRARY_IMPL(reef, CUDA, m) { m.impl("optim_step_", &reef::optim::optim_step); }
TORCH_LIBRARY_IMPL(reef, Meta, m) { m.impl("optim_step_", &reef::optim::optim_step_meta); }

namespace reef::optim::ops {

Tensor step(const std::string& rule, const std::string& state, const std::string& master,
            at::TensorList parameters, at::TensorList gradients, at::TensorList states,
            at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
            const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
            const std::optional<Tensor>& found_inf, at::IntArrayRef begins) {
  static const auto op = typed_operator<decltype(optim_step)>("reef::optim_step_");
  return op.call(rule, state, master, parameters, gradients, states, masters, steps, numbers, lr, grad_scale,
                 found_inf, begins);
}

std::int64_t slice_bytes(c10::Device device) { return optim_slice_bytes(device); }

}  // namespace reef::optim::ops
