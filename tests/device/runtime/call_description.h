// What the shapes of an operator's results depend on.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstdio>
#include <optional>
#include <string>

namespace reef::played {

/// Returns the name of an operator and its arguments, of tensors the dtype, sizes and strides. Returns
/// nothing if an argument is of another kind, or a tensor of the host, whose values a meta kernel may read.
inline std::optional<std::string> description_of(const c10::OperatorHandle& op,
                                                 const torch::jit::Stack& given) {
  std::string all = op.operator_name().name + "." + op.operator_name().overload_name;
  const auto number = [&](auto value) { all += " " + std::to_string(value); };
  const auto tensor = [&](const at::Tensor& each) {
    if (!each.defined()) return all += " undefined", true;
    if (!each.is_cuda()) return false;
    number(static_cast<int>(each.scalar_type()));
    for (const std::int64_t size : each.sizes()) number(size);
    all += " by";
    for (const std::int64_t stride : each.strides()) number(stride);
    return true;
  };
  for (const c10::IValue& value : given) {
    all += ";";
    if (value.isNone()) {
      all += "none";
    } else if (value.isTensor()) {
      if (!tensor(value.toTensor())) return {};
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector())
        if (!tensor(each)) return {};
    } else if (value.isBool()) {
      all += value.toBool() ? "true" : "false";
    } else if (value.isInt()) {
      number(value.toInt());
    } else if (value.isDouble()) {
      std::array<char, 40> exact;
      std::snprintf(exact.data(), exact.size(), "%a", value.toDouble());
      all += exact.data();
    } else if (value.isIntList()) {
      all += "list";
      for (const std::int64_t each : value.toIntVector()) number(each);
    } else {
      return {};
    }
  }
  return all;
}

}  // namespace reef::played
