#include "optim/norm_sums.h"

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reef/error.h"

namespace reef::optim {

using at::Tensor;

NormSums::NormSums(const ProcessGroupPtr& group) {
  if (!group) {
    throw ConfigError(
        "an optimizer was given no process group to add norms up over: make one with "
        "reef::init_process_group.");
  }
  if (group->getSize() == 1) return;
  tags_ = GroupTags::take(group, 1, at::kCPU);
  ranks_.emplace(group, tags_->first(), group->getSize());
}

Tensor NormSums::add_up(const Tensor& own) {
  if (!ranks_) return own;
  const RanksAmong& all = ranks_->all();
  const Tensor of_all = at::empty({all.count * own.numel()}, own.options());
  SliceExchange::slice(of_all, all.place, all.count).copy_(own.view({-1}));
  ranks_->all_gather("the sum of norms", of_all, all);
  return of_all.view({all.count, -1}).sum(0).view(own.sizes());
}

}  // namespace reef::optim

namespace {

struct BoundNormSums : torch::CustomClassHolder {
  explicit BoundNormSums(const reef::ProcessGroupPtr& group) : sums(group) {}
  reef::optim::NormSums sums;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.class_<BoundNormSums>("NormSums")
      .def(torch::init(
          [](const reef::ProcessGroupPtr& group) { return c10::make_intrusive<BoundNormSums>(group); }))
      .def("add_up", [](const c10::intrusive_ptr<BoundNormSums>& self, const at::Tensor& own) {
        return self->sums.add_up(own);
      });
}
