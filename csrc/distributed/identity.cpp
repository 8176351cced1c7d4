#include "distributed/identity.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <chrono>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "compat.h"

namespace reef {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Work that was done before it was made.
class DoneWork final : public c10d::Work {
 public:
  DoneWork(c10d::OpType type, Tensors result) : c10d::Work(0, type), result_(std::move(result)) { finish(); }

  Tensors result() override { return result_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::set<c10::DeviceIndex> seen;
    std::vector<c10::Device> devices;
    for (const auto& tensor : result_) {
      if (tensor.device().is_cuda() && seen.insert(tensor.device().index()).second) {
        devices.push_back(tensor.device());
      }
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::move(devices));
    future->markCompleted(c10::IValue(result_));
    return future;
  }

 private:
  Tensors result_;
};

WorkPtr done(c10d::OpType type, Tensors result = {}) {
  return c10::make_intrusive<DoneWork>(type, std::move(result));
}

/// `output` may have another shape with as many elements: a gathered tensor has one dimension more, or a
/// longer first.
void assign(const at::Tensor& output, const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  output.copy_(input.reshape(output.sizes()));
}

void copy_each(const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "a world of one was given ", inputs.size(),
                    " inputs for ", outputs.size(), " outputs");
  for (std::size_t i = 0; i < inputs.size(); ++i) assign(outputs[i], inputs[i]);
}

/// Per input tensor a list with one entry per rank, which is one.
Tensors only_entries(const TensorLists& lists) {
  Tensors result;
  for (const auto& list : lists) {
    TORCH_CHECK_VALUE(list.size() == 1, "a world of one was given a list of ", list.size(),
                      " tensors, one per rank");
    result.push_back(list.front());
  }
  return result;
}

/// The one reduction that is not the identity on a single value.
void premultiply(const Tensors& tensors, const c10d::ReduceOp& op) {
  if (op != c10d::ReduceOp::PREMUL_SUM || !op.supplement_) return;
  const at::NoGradGuard no_grad;
  const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
  for (const auto& tensor : tensors) {
    if (factor.tensor_factor.defined()) {
      tensor.mul_(factor.tensor_factor);
    } else {
      tensor.mul_(factor.double_factor);
    }
  }
}

class Identity final : public c10d::Backend {
 public:
  Identity() : c10d::Backend(/*rank=*/0, /*size=*/1) {}

  const std::string getBackendName() const override { return "identity"; }
  void setTimeout(std::chrono::milliseconds) override {}
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done(c10d::OpType::COALESCED); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return done(c10d::OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    premultiply(tensors, options.reduceOp);
    return done(c10d::OpType::ALLREDUCE, tensors);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done(c10d::OpType::_ALLREDUCE_SPARSE, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    premultiply(tensors, options.reduceOp);
    return done(c10d::OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    premultiply(tensors, options.reduceOp);
    return done(c10d::OpType::REDUCE, tensors);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return copied(c10d::OpType::ALLGATHER, only_entries(outputs), inputs);
  }
  /// Here the lists are per rank.
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK_VALUE(outputs.size() == 1, "a world of one was given ", outputs.size(),
                      " lists, one per rank");
    return copied(c10d::OpType::ALLGATHER_COALESCED, outputs.front(), inputs);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return copied(c10d::OpType::_ALLGATHER_BASE, {output}, {input});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    return copied(c10d::OpType::COALESCED, outputs, inputs);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions&) override {
    return copied(c10d::OpType::GATHER, only_entries(outputs), inputs);
  }
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input,
                             const c10d::GatherOptions&) REEF_OVERRIDE_SINCE_2_15 {
    return copied(c10d::OpType::GATHER, {output}, {input});
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions&) override {
    return copied(c10d::OpType::SCATTER, outputs, only_entries(inputs));
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    return reduced(c10d::OpType::REDUCE_SCATTER, outputs, only_entries(inputs), options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduced(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input}, options);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return reduced(c10d::OpType::COALESCED, outputs, inputs, options);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override {
    return copied(c10d::OpType::ALLTOALL_BASE, {output}, {input});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return copied(c10d::OpType::ALLTOALL, outputs, inputs);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override { return done(c10d::OpType::BARRIER); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}

 private:
  static WorkPtr copied(c10d::OpType type, const Tensors& outputs, const Tensors& inputs) {
    copy_each(outputs, inputs);
    return done(type, outputs);
  }
  static WorkPtr reduced(c10d::OpType type, const Tensors& outputs, const Tensors& inputs,
                         const c10d::ReduceScatterOptions& options) {
    copy_each(outputs, inputs);
    premultiply(outputs, options.reduceOp);
    return done(type, outputs);
  }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_identity_backend() { return c10::make_intrusive<Identity>(); }

c10::intrusive_ptr<c10d::ProcessGroup> make_world_of_one(const std::string& name) {
  using Group = c10d::ProcessGroup;
  auto group = c10::make_intrusive<Group>(c10::make_intrusive<c10d::HashStore>(), 0, 1);
  const auto identity = make_identity_backend();
  for (const auto device : {c10::kCPU, c10::kCUDA, c10::kXPU, c10::kMPS, c10::kPrivateUse1}) {
    group->setBackend(device, Group::CUSTOM, identity);
  }
  group->setDefaultBackend(Group::CUSTOM);
  group->setGroupName(name);
  return group;
}

}  // namespace reef
