#include "optim/operators.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "kernels/optim_step/rounding.h"
#include "optim/one_bit_adam.h"
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

/// What an operator is given, and what it makes of the names.
struct Given {
  const char* op;
  const std::string& rule_name;
  const std::string& state;
  const std::string& master;
  at::TensorList parameters, gradients, states, masters, steps;
  OptimHyper hyper;
  float gain = 1;

  Given(const char* of, const std::string& rule_given, const std::string& state_given,
        const std::string& master_given, at::TensorList all, at::TensorList all_gradients,
        at::TensorList all_states, at::TensorList all_masters, at::TensorList all_steps,
        at::ArrayRef<double> numbers, const std::optional<Tensor>& lr,
        const std::optional<Tensor>& grad_scale)
      : op(of),
        rule_name(rule_given),
        state(state_given),
        master(master_given),
        parameters(all),
        gradients(all_gradients),
        states(all_states),
        masters(all_masters),
        steps(all_steps),
        hyper(OptimHyper::of(numbers.vec())) {
    if (lr && lr->defined()) hyper.lr = lr->item<double>();
    if (grad_scale && grad_scale->defined()) gain = 1 / grad_scale->item<float>();
  }
  OptimRule rule() const { return optim_rule(rule_name, hyper); }
  c10::Device device() const { return parameters.empty() ? c10::Device(at::kCPU) : parameters[0].device(); }
};

std::vector<OptimWork> works_of(const Given& given) {
  const std::vector<OptimStateName> names = optim_states(given.rule());
  const OptimFormat asked = optim_format(given.state);
  const OptimMaster kind = optim_master(given.master);
  const std::size_t count = given.parameters.size();
  const bool has_masters = kernels::optim_master_bytes(kind) > 0;
  if (given.gradients.size() != count || given.steps.size() != count ||
      given.states.size() != count * names.size() * 2 || given.masters.size() != (has_masters ? count : 0)) {
    throw ConfigError(std::string(given.op) + ": for " + std::to_string(count) + " parameters and rule " +
                      given.rule_name + " give as many gradients and steps, " +
                      std::to_string(names.size() * 2) +
                      " states of each (codes, scales) and, for this kind, masters");
  }
  const c10::Device device = given.device();
  std::vector<OptimWork> works(count);
  for (std::size_t i = 0; i < count; ++i) {
    const Subject subject{given.op, static_cast<std::int64_t>(i)};
    OptimWork& work = works[i];
    kernels::OptimTensor& tensor = work.tensor;
    const Tensor& parameter = given.parameters[i];
    const Tensor& gradient = given.gradients[i];
    const Tensor& step = given.steps[i];
    check_dense(subject, parameter, "memory");
    check_dense(subject, gradient, "a gradient");
    check_device(subject, parameter, "memory", device);
    check_device(subject, gradient, "a gradient", device);
    check_device(subject, step, "a count of steps", at::kCPU);
    if (step.scalar_type() != at::kFloat || step.numel() != 1)
      refuse(subject,
             "has a count of steps that is not one number of float32; give torch.tensor(float(step))");
    if (gradient.sizes() != parameter.sizes() || gradient.strides() != parameter.strides()) {
      refuse(subject,
             "has a gradient of another shape or layout; give grad.contiguous() in the parameter's layout");
    }
    tensor.parameter_dtype = dtype_of(subject, parameter, "values");
    tensor.gradient_dtype = dtype_of(subject, gradient, "a gradient");
    tensor.parameter = bytes_of(parameter);
    tensor.gradient = static_cast<const std::byte*>(gradient.const_data_ptr());
    tensor.elements = parameter.numel();
    tensor.master_kind = tensor.parameter_dtype == OptimDtype::kFloat32 ? OptimMaster::kNone : kind;
    if (kernels::optim_master_bytes(tensor.master_kind) > 0) {
      const Tensor& master = given.masters[i];
      check_device(subject, master, "master weights", device);
      const auto dtype = tensor.master_kind == OptimMaster::kFloat32 ? at::kFloat : at::kByte;
      if (master.scalar_type() != dtype || !same_layout(master, parameter))
        refuse(subject,
               "has master weights of another size, dtype or layout; load the state again, or begin anew");
      tensor.master = bytes_of(master);
    }
    for (std::size_t k = 0; k < names.size(); ++k) {
      const Tensor& codes = given.states[(i * names.size() + k) * 2];
      const Tensor& scales = given.states[(i * names.size() + k) * 2 + 1];
      const OptimFormat format = format_of(asked, codes, parameter, names[k].is_signed);
      const bool wide = format == OptimFormat::kFloat32;
      if (k > 0 && wide != (work.format == OptimFormat::kFloat32))
        refuse(subject, "has states in two formats");
      if (k == 0 || format == OptimFormat::kInt4Rank1) work.format = format;
      tensor.states[k] = state_of(subject, names[k].name, format, codes, scales, parameter, device);
    }
    work.step = *static_cast<const float*>(step.const_data_ptr()) + 1;
    const std::optional<Part> part = part_of(parameter);
    work.adapts = whole_shape_of(parameter).size() > 1;
    tensor.key = kernels::key_of_tensor(static_cast<std::int64_t>(work.step), part ? part->first : 0);
    tensor.constants.gradient = given.gain;
  }
  return works;
}

// Digits of an ExactSum each: of the parameter's squares, and of what it is measured against.
constexpr std::int64_t kDigits = kernels::ExactSum::kDigits + 1;

Tensor optim_squares(const std::string& rule_name, const std::string& state, const std::string& master,
                     at::TensorList parameters, at::TensorList gradients, at::TensorList states,
                     at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
                     const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale) {
  const Given given("optim_squares", rule_name, state, master, parameters, gradients, states, masters, steps,
                    numbers, lr, grad_scale);
  if (!needs_norms(given.rule()))
    throw ConfigError("optim_squares: rule " + rule_name + " needs no norms; step without them");
  if (!given.device().is_cpu()) {
    refuse({given.op, 0}, "is on " + given.device().str() +
                              ", and norms over ranks are of parts on the CPU; "
                              "shard with offload, or by stage \"replicate\"");
  }
  std::vector<OptimWork> works = works_of(given);
  for (OptimWork& work : works) set_constants(given.rule(), given.hyper, work);
  const std::vector<ExactSquares> squares = squares_on_cpu(given.rule(), works);
  Tensor digits = at::empty({static_cast<std::int64_t>(works.size()), 2, kDigits}, at::kLong);
  auto* to = digits.mutable_data_ptr<std::int64_t>();
  for (const ExactSquares& each : squares) {
    for (const kernels::ExactSum& sum : {each.parameter, each.measured}) {
      const kernels::ExactSum::Digits carried = sum.carried();
      to = std::copy(carried.begin(), carried.end(), to);
    }
  }
  return digits;
}

double sum_of(const std::int64_t* digits) {
  kernels::ExactSum::Digits all{};
  std::copy_n(digits, all.size(), all.begin());
  kernels::ExactSum sum;
  sum.add(all);
  return sum.value();
}

// The norms of whole parameters, which steps of their parts need.
void take_squares(const Given& given, const std::optional<Tensor>& squares, std::vector<OptimWork>& works) {
  const auto count = static_cast<std::int64_t>(works.size());
  const bool has = squares && squares->defined();
  if (has && (squares->sizes() != at::IntArrayRef({count, 2, kDigits}) ||
              squares->scalar_type() != at::kLong || !squares->is_cpu() || !squares->is_contiguous())) {
    throw ConfigError(std::string(given.op) + ": give squares of " + std::to_string(count) +
                      " parameters as optim_squares does");
  }
  for (std::size_t i = 0; i < works.size(); ++i) {
    const std::optional<Part> part = part_of(given.parameters[i]);
    if (part && !has) {
      refuse({given.op, static_cast<std::int64_t>(i)},
             "is a part of one of " + std::to_string(part->whole_elements) + " elements, whose norm " +
                 given.rule_name +
                 " needs; give the optimizer the group of the ranks that have the others (C++: norms_over(), "
                 "Python: group=) and step without GradientRelease, shard by stage \"replicate\", or take a "
                 "rule without norms");
    }
    if (!has) continue;
    const std::int64_t* const digits =
        squares->const_data_ptr<std::int64_t>() + 2 * kDigits * static_cast<std::int64_t>(i);
    works[i].squares = {sum_of(digits), sum_of(digits + kDigits)};
  }
}

Tensor optim_step(const std::string& rule_name, const std::string& state, const std::string& master,
                  at::TensorList parameters, at::TensorList gradients, at::TensorList states,
                  at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
                  const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
                  const std::optional<Tensor>& found_inf, at::IntArrayRef begins,
                  const std::optional<Tensor>& squares) {
  const Given given("optim_step_", rule_name, state, master, parameters, gradients, states, masters, steps,
                    numbers, lr, grad_scale);
  const std::size_t count = parameters.size();
  const c10::Device device = given.device();
  const at::TensorOptions counters = at::TensorOptions().dtype(at::kLong).device(device);
  Tensor nonfinite = at::zeros({static_cast<std::int64_t>(count)}, counters);
  const auto is_there = [](const std::optional<Tensor>& tensor) { return tensor && tensor->defined(); };
  if (is_one_bit_adam(rule_name) && (is_there(grad_scale) || is_there(found_inf))) {
    throw ConfigError(
        "one_bit_adam: gradients are scaled, and the momentum of scales that change is none; step without a "
        "GradScaler");
  }
  if (says_skip(found_inf)) return nonfinite;
  std::vector<OptimWork> works = works_of(given);
  const OptimRule rule = given.rule();
  if (needs_norms(rule)) take_squares(given, squares, works);
  for (const std::int64_t i : begins) {
    if (i < 0 || i >= static_cast<std::int64_t>(count))
      throw ConfigError("optim_step_: the momentum of parameter " + std::to_string(i) + " begins, of " +
                        std::to_string(count));
    works[static_cast<std::size_t>(i)].begins = true;
  }
  if (is_one_bit_adam(rule_name)) {
    check_exchange(rule_name, state, given.hyper, parameters);
    for (std::size_t i = 0; i < count; ++i) works[i].gets_momentum = gets_momentum(parameters[i]);
  }
  // All have been found sound: nothing is changed before.
  for (std::size_t i = 0; i < count; ++i) {
    if (works[i].gets_momentum) hold_without_moment(states[4 * i + 2]);
  }
  for (std::size_t i = 0; i < count; ++i) {
    *static_cast<float*>(steps[i].mutable_data_ptr()) = static_cast<float>(works[i].step);
  }
  auto* const found = nonfinite.mutable_data_ptr<std::int64_t>();
  if (device.is_cuda()) {
    step_on_cuda(device, rule, given.hyper, works, found);
  } else {
    step_on_cpu(rule, given.hyper, works, found);
  }
  return nonfinite;
}

Tensor optim_squares_meta(const std::string&, const std::string&, const std::string&,
                          at::TensorList parameters, at::TensorList, at::TensorList, at::TensorList,
                          at::TensorList, at::ArrayRef<double>, const std::optional<Tensor>&,
                          const std::optional<Tensor>&) {
  return at::empty({static_cast<std::int64_t>(parameters.size()), 2, kDigits},
                   at::TensorOptions().dtype(at::kLong).device(at::kMeta));
}

Tensor optim_step_meta(const std::string&, const std::string&, const std::string&, at::TensorList parameters,
                       at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::ArrayRef<double>,
                       const std::optional<Tensor>&, const std::optional<Tensor>&,
                       const std::optional<Tensor>&, at::IntArrayRef, const std::optional<Tensor>&) {
  return at::empty({static_cast<std::int64_t>(parameters.size())},
                   at::TensorOptions().dtype(at::kLong).device(at::kMeta));
}

// Few calls, but small working sets where a budget is kept; on a device, one launch.
std::int64_t optim_slice_bytes(c10::Device device) {
  if ((device.is_cpu() || device.is_cuda()) && Pager::of(device).running()) return 0;
  return device.is_cuda() ? std::numeric_limits<std::int64_t>::max() : std::int64_t{64} << 20;
}

void optim_check_exchange(const std::string& rule, const std::string& state, at::ArrayRef<double> numbers,
                          at::TensorList parameters) {
  check_exchange(rule, state, OptimHyper::of(numbers.vec()), parameters);
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
      "Tensor? grad_scale=None, Tensor? found_inf=None, int[] begins=[], Tensor? squares=None) -> Tensor");
  m.def(
      "optim_squares(str rule, str state, str master, Tensor[] parameters, Tensor[] gradients, "
      "Tensor[] states, Tensor[] masters, Tensor[] steps, float[] numbers, Tensor? lr=None, "
      "Tensor? grad_scale=None) -> Tensor");
  m.def("optim_check_exchange(str rule, str state, float[] numbers, Tensor[] parameters) -> ()",
        &reef::optim::optim_check_exchange);
  m.def("optim_check_given(bool has_states, Tensor[] parameters, Tensor[] gradients) -> ()");
  m.def("optim_slice_bytes(Device device) -> int", &reef::optim::optim_slice_bytes);
  m.def("optim_state_names(str rule, float[] numbers) -> str[]", &reef::optim::optim_state_names);
}

TORCH_LIBRARY_IMPL(reef, CPU, m) {
  m.impl("optim_step_", &reef::optim::optim_step);
  m.impl("optim_check_given", &reef::optim::check_given);
  m.impl("optim_squares", &reef::optim::optim_squares);
}
TORCH_LIBRARY_IMPL(reef, CUDA, m) {
  m.impl("optim_step_", &reef::optim::optim_step);
  m.impl("optim_squares", &reef::optim::optim_squares);
}
TORCH_LIBRARY_IMPL(reef, Meta, m) {
  m.impl("optim_step_", &reef::optim::optim_step_meta);
  m.impl("optim_squares", &reef::optim::optim_squares_meta);
}

namespace reef::optim::ops {

Tensor step(const std::string& rule, const std::string& state, const std::string& master,
            at::TensorList parameters, at::TensorList gradients, at::TensorList states,
            at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers,
            const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_scale,
            const std::optional<Tensor>& found_inf, at::IntArrayRef begins,
            const std::optional<Tensor>& squares) {
  static const auto op = typed_operator<decltype(optim_step)>("reef::optim_step_");
  return op.call(rule, state, master, parameters, gradients, states, masters, steps, numbers, lr, grad_scale,
                 found_inf, begins, squares);
}

Tensor squares(const std::string& rule, const std::string& state, const std::string& master,
               at::TensorList parameters, at::TensorList gradients, at::TensorList states,
               at::TensorList masters, at::TensorList steps, at::ArrayRef<double> numbers) {
  static const auto op = typed_operator<decltype(optim_squares)>("reef::optim_squares");
  return op.call(rule, state, master, parameters, gradients, states, masters, steps, numbers, std::nullopt,
                 std::nullopt);
}

void check_given(bool has_states, at::TensorList parameters, at::TensorList gradients) {
  static const auto op = typed_operator<decltype(optim::check_given)>("reef::optim_check_given");
  op.call(has_states, parameters, gradients);
}

std::int64_t slice_bytes(c10::Device device) { return optim_slice_bytes(device); }

}  // namespace reef::optim::ops
