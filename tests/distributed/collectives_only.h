#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "reef/collectives.h"

namespace reef {

/// gloo without its messages, under another name.
class CollectivesOnly final : public c10d::Backend {
 public:
  using Tensor = at::Tensor;
  using Tensors = std::vector<Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit CollectivesOnly(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "collectives_only"; }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return gloo_->broadcast(tensors, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return gloo_->allreduce(tensors, options);
  }
  WorkPtr allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    return gloo_->allgather(to, from, options);
  }
  WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& options) override {
    return gloo_->_allgather_base(to, from, options);
  }
  WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<std::int64_t>& out,
                        std::vector<std::int64_t>& in, const c10d::AllToAllOptions& options) override {
    return gloo_->alltoall_base(to, from, out, in, options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

/// Of the same ranks, on one path with those of devices.
inline ProcessGroupPtr collectives_only(const ProcessGroupPtr& group) {
  const auto made = c10::make_intrusive<c10d::ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>("without_messages", group->getStore()), group->getRank(),
      group->getSize());
  made->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM,
                   c10::make_intrusive<CollectivesOnly>(group->getBackend(c10::kCPU)));
  made->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  made->setGroupName("without_messages");
  return made;
}

}  // namespace reef
