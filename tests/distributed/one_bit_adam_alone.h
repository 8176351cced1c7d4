#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/packed_levels.h"
#include "shard/flat.h"

namespace reef {

/// What all ranks do with one bucket in the exchange of 1-bit Adam, in one process and in plain tensors of
/// the whole bucket. `divided`: among `degree` ranks, of each of so many copies.
struct OneBitAdamAlone {
  using Tensor = at::Tensor;
  int ranks, degree;
  bool divided;
  int warm_up;
  double beta1;
  std::vector<FlatPlace> places = {};  ///< of parameters; empty: a parameter is all of the bucket

  int copies() const { return divided ? ranks / degree : 1; }

  /// Gives the mean gradient, or after the warm-up the momentum. The `used`-th step that ranks have used.
  Tensor step(const std::vector<Tensor>& gradients, int used) {
    if (!momentum.defined()) momentum = torch::zeros_like(gradients[0]);
    if (used < warm_up) {
      Tensor mean = gradients[0].clone();
      for (int of = 1; of < ranks; ++of) mean.add_(gradients[static_cast<std::size_t>(of)]);
      mean.div_(ranks);
      momentum = momentum.mul(beta1).add_(mean.mul(1 - beta1));
      return mean;
    }
    const int together = copies() > 1 ? degree : 1;
    const int slices = divided ? degree : ranks;
    residuals.resize(static_cast<std::size_t>(ranks / together));
    Tensor sum;
    for (int first = 0; first < ranks; first += together) {
      Tensor all = gradients[static_cast<std::size_t>(first)].clone();
      for (int of = 1; of < together; ++of) all.add_(gradients[static_cast<std::size_t>(first + of)]);
      all = momentum.mul(beta1 * together).add_(all.mul(1 - beta1));
      if (ranks == 1) return momentum = all;
      const Tensor said = coded(all, residuals[static_cast<std::size_t>(first / together)], slices);
      sum = sum.defined() ? sum.add(said) : said;
    }
    if (copies() == 1) sum = coded(sum, residual_of_sum, slices);
    return momentum = sum.div(ranks);
  }

  /// Of these elements no rank has a gradient in this step: they are remembered as `before` has them.
  void leave_out(const OneBitAdamAlone& before, std::int64_t first, std::int64_t elements) {
    const auto put_back = [&](Tensor& now, const Tensor& was) {
      if (!now.defined()) return;
      now = now.clone();
      const Tensor part = now.narrow(0, first, elements);
      if (was.defined()) {
        part.copy_(was.narrow(0, first, elements));
      } else {
        part.zero_();
      }
    };
    put_back(momentum, before.momentum);
    put_back(residual_of_sum, before.residual_of_sum);
    for (std::size_t i = 0; i < residuals.size(); ++i)
      put_back(residuals[i], i < before.residuals.size() ? before.residuals[i] : Tensor());
  }

  Tensor momentum = {}, residual_of_sum = {};
  std::vector<Tensor> residuals = {};  ///< of ranks, or of copies

 private:
  /// What codes say of the values and of what was held back, which becomes what they lose.
  Tensor coded(const Tensor& values, Tensor& residual, int slices) const {
    const Tensor all = residual.defined() ? values.add(residual) : values.clone();
    std::vector<Tensor> said;
    for (const Tensor& slice : all.chunk(slices)) {
      std::vector<std::uint8_t> code(static_cast<std::size_t>(kernels::packed_bytes(slice.numel(), 1)));
      kernels::encode_signs(slice.mutable_data_ptr<float>(), slice.numel(), code.data());
      float* const to = said.emplace_back(torch::empty_like(slice)).mutable_data_ptr<float>();
      kernels::sum_of_packed({code.data()}, /*bits=*/1, slice.numel(), to);
    }
    residual = of_parameters(all);
    return of_parameters(torch::cat(said));
  }
  /// Zero between parameters.
  Tensor of_parameters(const Tensor& values) const {
    if (places.empty()) return values;
    Tensor kept = torch::zeros_like(values);
    for (const FlatPlace& place : places) place.of(kept).copy_(place.of(values));
    return kept;
  }
};

}  // namespace reef
