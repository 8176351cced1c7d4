#include "reef/clip_grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clip_grad_norm.h"
#include "distributed/sum_over_ranks.h"
#include "given_momentum.h"
#include "kernels/sum_of_squares.h"
#include "reef/error.h"
#include "reef/part.h"
#include "typed_operator.h"

namespace reef {
namespace {

using at::Tensor;
using kernels::ExactSum;
using kernels::FloatFormat;
using kernels::kSquaresTogether;

Tensor tensor_of(const ExactSum& sum) {
  const ExactSum::Digits digits = sum.carried();
  Tensor made = at::empty({static_cast<std::int64_t>(digits.size())}, at::kLong);
  std::memcpy(made.mutable_data_ptr(), digits.data(), sizeof digits);
  return made;
}
ExactSum::Digits digits_of(const Tensor& tensor) {
  ExactSum::Digits digits{};
  std::memcpy(digits.data(), tensor.const_data_ptr(), sizeof digits);
  return digits;
}

FloatFormat format_of(const Tensor& gradient) {
  if (const std::optional<FloatFormat> format = kernels::float_format(gradient)) return *format;
  throw ConfigError(std::string("clip_grad_norm_: a gradient of dtype ") +
                    c10::toString(gradient.scalar_type()) +
                    " has no norm here; float64, float32, float16 and bfloat16 have");
}

// Of memory that has no gaps, in its order. An operator, so that whoever watches operators (a budget) sees
// it.
Tensor sum_of_squares(const Tensor& dense) {
  return tensor_of(kernels::sum_of_squares(dense.const_data_ptr(), dense.numel(), format_of(dense)));
}

// On a device the sums of 256 are of an order of its own, the same wherever a part begins.
Tensor sums_on_device(const Tensor& dense) {
  const Tensor flat =
      at::empty({0}, dense.options()).set_(dense.storage(), dense.storage_offset(), {dense.numel()}, {1});
  const std::int64_t padding = (kSquaresTogether - dense.numel() % kSquaresTogether) % kSquaresTogether;
  return at::constant_pad_nd(flat.to(at::kDouble), {0, padding}).square().view({-1, kSquaresTogether}).sum(1);
}

void add(const Tensor& sums, ExactSum& to) {
  for (std::int64_t i = 0; i < sums.numel(); ++i) to.add(sums.const_data_ptr<double>()[i]);
}

Tensor sum_of_squares_on_device(const Tensor& dense) {
  ExactSum sum;
  add(read_by_host(sums_on_device(dense)), sum);
  return tensor_of(sum);
}

// Returns the gradient with the strides of its parameter and without gaps, as a copy if it has others.
Tensor dense_gradient(const Tensor& parameter) {
  const Tensor& gradient = parameter.grad();
  if (gradient.layout() != c10::kStrided) {
    throw ConfigError(
        "clip_grad_norm_: a gradient is sparse; make its layer dense (sparse=False), or leave its parameter "
        "out");
  }
  format_of(gradient);
  if (gradient.strides() == parameter.strides() && gradient.is_non_overlapping_and_dense()) return gradient;
  return at::empty_like(parameter, gradient.options()).copy_(gradient);
}

/// The sums of squares of gradients of whole parameters, and of parts, which are added up over the ranks
/// afterwards. Sums of a device are read when all have been launched, so that the host waits once for each
/// device.
struct Squares {
  ExactSum whole, of_parts;
  struct OnDevice {
    std::vector<Tensor> whole, of_parts;
  };
  std::map<c10::DeviceIndex, OnDevice> on_devices;

  void add(const Tensor& dense, bool is_part) {
    static const auto op = typed_operator<decltype(sum_of_squares)>("reef::sum_of_squares");
    if (!dense.is_cuda()) return (is_part ? of_parts : whole).add(digits_of(op.call(dense)));
    OnDevice& there = on_devices[dense.device().index()];
    (is_part ? there.of_parts : there.whole).push_back(sums_on_device(dense));
  }
  void read() {
    for (auto& [device, there] : on_devices) {
      std::int64_t of_whole = 0;
      for (const Tensor& sums : there.whole) of_whole += sums.numel();
      std::vector<Tensor> all = std::move(there.whole);
      all.insert(all.end(), there.of_parts.begin(), there.of_parts.end());
      const Tensor sums = read_by_host(at::cat(all));
      reef::add(sums.narrow(0, 0, of_whole), whole);
      reef::add(sums.narrow(0, of_whole, sums.numel() - of_whole), of_parts);
    }
  }
};

}  // namespace

double clip_grad_norm_(const std::vector<GradientInNorm>& gradients, double max_norm,
                       const ProcessGroupPtr& group, c10::Device device) {
  if (!(max_norm >= 0))
    throw ConfigError("clip_grad_norm_: max_norm is " + std::to_string(max_norm) + "; give 0 or more");
  const at::NoGradGuard no_grad;
  Squares squares;
  for (const auto& [parameter, counts] : gradients) {
    refuse_momentum("clip_grad_norm_", parameter);
    if (!parameter.grad().defined() || parameter.numel() == 0) continue;
    if (counts == GradientInNorm::Counts::kElsewhere) continue;
    squares.add(dense_gradient(parameter), counts == GradientInNorm::Counts::kHere);
  }
  squares.read();
  ExactSum& sum = squares.whole;
  sum.add(digits_of(sum_over_ranks(tensor_of(squares.of_parts), device, group)));
  const double norm = std::sqrt(sum.value());
  const double factor = max_norm / (norm + 1e-6);
  if (!std::isfinite(norm) || factor >= 1) return norm;
  for (const auto& [parameter, counts] : gradients) {
    if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
  }
  return norm;
}

double clip_grad_norm_(at::TensorList parameters, double max_norm, const ProcessGroupPtr& group) {
  std::vector<GradientInNorm> gradients;
  for (const Tensor& parameter : parameters) {
    using Counts = GradientInNorm::Counts;
    if (ParametersOfOneRank::find(parameter))
      throw ConfigError(
          "clip_grad_norm_ was given a parameter of which other ranks have others, so this norm would be "
          "that of "
          "a part of the model: call clip_grad_norm_() of the pipeline.");
    const std::optional<Part> part = part_of(parameter);
    gradients.push_back({parameter, !part            ? Counts::kEverywhere
                                    : part->copy > 0 ? Counts::kElsewhere
                                                     : Counts::kHere});
  }
  const c10::Device device = parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
  return clip_grad_norm_(gradients, max_norm, group, device);
}

}  // namespace reef

TORCH_LIBRARY_FRAGMENT(reef, m) { m.def("sum_of_squares(Tensor dense) -> Tensor"); }

TORCH_LIBRARY_IMPL(reef, CPU, m) { m.impl("sum_of_squares", &reef::sum_of_squares); }
TORCH_LIBRARY_IMPL(reef, CUDA, m) { m.impl("sum_of_squares", &reef::sum_of_squares_on_device); }
TORCH_LIBRARY_IMPL(reef, Meta, m) {
  m.impl("sum_of_squares", [](const at::Tensor&) {
    return at::empty({static_cast<std::int64_t>(reef::kernels::ExactSum::kDigits + 1)},
                     at::TensorOptions().dtype(at::kLong).device(at::kMeta));
  });
}
