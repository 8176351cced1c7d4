#include "pipeline_run/deliveries.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

namespace reef {

TensorListMessage packed(const PipelineCourse::Delivery& delivery, const PassTensors& made) {
  TensorListMessage content;
  const auto add = [&](const at::Tensor& tensor) {
    content.tensors.push_back(tensor);
    content.requires_grad.push_back(tensor.defined() && tensor.requires_grad());
  };
  if (delivery.has_outputs) {
    for (const at::Tensor& tensor : made.tensors) add(tensor);
  }
  for (const std::size_t skip : delivery.skips) {
    if (const auto of_skip = made.skips.find(skip); of_skip != made.skips.end()) add(of_skip->second);
  }
  return content;
}

void unpack(const PipelineCourse::Delivery& delivery, TensorListMessage content, c10::Device device,
            PassTensors& to) {
  if (content.tensors.size() < delivery.skips.size()) return;
  for (std::size_t i = 0; i < content.tensors.size(); ++i) {
    at::Tensor& tensor = content.tensors[i];
    if (!tensor.defined()) continue;
    tensor = tensor.to(device);
    if (i < content.layouts.size() && !content.layouts[i].strides.empty())
      tensor = with_layout(tensor, content.layouts[i]);
    if (content.requires_grad[i]) tensor.set_requires_grad(true);
  }
  const auto first = content.tensors.end() - static_cast<std::ptrdiff_t>(delivery.skips.size());
  for (std::size_t i = 0; i < delivery.skips.size(); ++i)
    to.skips[delivery.skips[i]] = std::move(*(first + static_cast<std::ptrdiff_t>(i)));
  content.tensors.erase(first, content.tensors.end());
  if (delivery.has_outputs) to.tensors = std::move(content.tensors);
}

}  // namespace reef
