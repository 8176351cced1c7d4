#include "pipeline_run/waves.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "reef/error.h"
#include "round_up.h"

namespace reef {
namespace {

using at::Tensor;

constexpr std::uint64_t kAlignment = 16;  // of any dtype in a slice
constexpr std::int64_t kFlagBytes = 16;   // before the values: whether there are any
constexpr std::uint8_t kHasFailed = 1;

}  // namespace

PipelineWaves::PipelineWaves(std::vector<Tensor> parameters, const ProcessGroupPtr& ranks, Rule rule)
    : parameters_(std::move(parameters)),
      rule_(rule),
      number_(GroupTags::take(ranks, 1, c10::kCPU)),
      exchange_(ranks, number_.first(), ranks->getSize()) {
  slice_bytes_ = kFlagBytes;
  for (const Tensor& parameter : parameters_) {
    begins_.push_back(slice_bytes_);
    slice_bytes_ += static_cast<std::int64_t>(round_up(parameter.nbytes(), kAlignment));
    common_.push_back(parameter.detach().clone());
    before_.push_back(parameter.detach().clone());
  }
}

void PipelineWaves::add_change(const Tensor& slices, int worker, const std::vector<Tensor>& to) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor& parameter = parameters_[i];
    const Tensor change =
        slices.narrow(0, worker * slice_bytes_ + begins_[i], static_cast<std::int64_t>(parameter.nbytes()))
            .view(parameter.scalar_type())
            .view(parameter.sizes());
    to[i].detach().add_(change.to(parameter.device()));
  }
}

void PipelineWaves::tell(bool has_failed) {
  Wave wave{at::empty({slice_bytes_ * exchange_.all().count}, at::kByte)};
  const Tensor own = exchange_.own_slice(wave.slices);
  own.zero_();
  if (has_failed) {
    own.narrow(0, 0, 1).fill_(kHasFailed);
  } else {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor& parameter = parameters_[i];
      own.narrow(0, begins_[i], static_cast<std::int64_t>(parameter.nbytes()))
          .view(parameter.scalar_type())
          .view(parameter.sizes())
          .copy_(parameter.detach() - before_[i]);
    }
  }
  ++ended_;
  wave.wait = exchange_.begin_all_gather(wave.slices, static_cast<int>(ended_ - 1));
  told_.push_back(std::move(wave));
}

void PipelineWaves::add_first_wave() {
  const Wave wave = std::move(told_.front());
  told_.pop_front();
  wave.wait();
  const int workers = exchange_.all().count;
  for (int worker = 0; worker < workers; ++worker) {
    if (wave.slices[worker * slice_bytes_].item<std::uint8_t>() == kHasFailed)
      throw PassAbandoned("a pass of virtual worker " + std::to_string(worker) + " has failed", worker);
  }
  for (int worker = 0; worker < workers; ++worker) add_change(wave.slices, worker, common_);
}

void PipelineWaves::end(std::uint32_t wave) {
  const at::NoGradGuard no_grad;
  tell(/*has_failed=*/false);
  const bool adds = told_.size() > may_lack(wave);
  while (told_.size() > may_lack(wave)) add_first_wave();
  if (adds) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].detach().copy_(common_[i]);
    for (const Wave& later : told_) add_change(later.slices, exchange_.all().place, parameters_);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) before_[i].copy_(parameters_[i].detach());
}

void PipelineWaves::leave(std::uint32_t wave) noexcept {
  const at::NoGradGuard no_grad;
  try {
    while (ended_ <= wave) tell(/*has_failed=*/true);
    for (; told_.size() > may_lack(wave); told_.pop_front()) told_.front().wait();
  } catch (const std::exception&) {  // a rank is gone, which all calls that follow say
  }
}

}  // namespace reef
