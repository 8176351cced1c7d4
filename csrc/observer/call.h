#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

namespace reef {

/// What can be read off an operator's call.

/// Whether this thread is running a backward pass.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

/// Calls `visit` with every tensor among `value`, in lists and tuples too, until it returns true; says
/// whether it did.
template <class Visit>
bool any_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  const auto among = [&](const auto& elements) {
    for (const c10::IValue& element : elements) {
      if (any_tensor(element, visit)) return true;
    }
    return false;
  };
  if (value.isList()) return among(value.toListRef());
  if (value.isTuple()) return among(value.toTupleRef().elements());
  return false;
}

/// Whether autograd records the call, and so may save its tensors.
inline bool records_gradient(const at::RecordFunction& call) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const c10::IValue& input : call.inputs()) {
    if (any_tensor(input, [](const at::Tensor& t) { return t.defined() && t.requires_grad(); })) return true;
  }
  return false;
}

}  // namespace reef
