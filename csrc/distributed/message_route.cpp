#include "distributed/message_route.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/members.h"
#include "distributed/message_header.h"
#include "distributed/sigpipe.h"
#include "reef/error.h"

namespace reef {

using at::Tensor;

MessageRoute MessageRoute::to(const std::string& name, int other, const ProcessGroupPtr& group) {
  if (!group)
    throw ConfigError(name + " was given no process group: make one with reef::init_process_group.");
  const int size = group->getSize();
  if (other < 0 || other >= size || other == group->getRank()) {
    throw ConfigError(name + " was given rank " + std::to_string(other) + " on rank " +
                      std::to_string(group->getRank()) + " of " + std::to_string(size) +
                      ": messages go to and from another rank of the group.");
  }
  const auto devices = group->getDeviceTypes();
  const bool gloo =
      std::any_of(devices.begin(), devices.end(), [](const auto& each) { return each.is_cpu(); }) &&
      group->getBackend(c10::kCPU)->getBackendName() == "gloo";
  if (!gloo)
    throw ConfigError(name +
                      " was given a group without gloo for the CPU, by which messages travel: make one with "
                      "reef::init_process_group.");
  return {GroupUse::of(group), other};
}

c10::intrusive_ptr<c10d::Work> MessageRoute::give(const Tensor& bytes, int tag) const {
  const SigpipeBlocked blocked;  // gloo writes to the socket on the thread that calls, if it can
  std::vector<Tensor> tensors = {bytes};
  return group().send(tensors, other, tag);
}

c10::intrusive_ptr<c10d::Work> MessageRoute::take(const Tensor& bytes, int tag) const {
  const SigpipeBlocked blocked;
  std::vector<Tensor> tensors = {bytes};
  return group().recv(tensors, other, tag);
}

void MessageRoute::wait(const Works& works) const {
  for (const auto& work : works) use->wait_for_message(work, other);
}

void MessageRoute::run(const std::string& name, const std::function<void()>& exchange) const {
  try {
    if (Heartbeat* const heart = heart_of(group())) heart->check();
    exchange();
  } catch (const std::exception& error) {
    const std::exception_ptr failed = rank_failed(group(), name, error);
    use->fail();
    std::rethrow_exception(failed);
  }
}

Tensor bytes_of_message(const Tensor& tensor, std::int64_t first, std::int64_t count) {
  Tensor bytes = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()),
                                                          c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                          caffe2::TypeMeta::Make<std::uint8_t>());
  const std::int64_t offset = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  bytes.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef{count}, at::IntArrayRef{1},
                                                     offset + first);
  return bytes;
}

Tensor values_of_message(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor.detach().resolve_conj().resolve_neg().contiguous();
  const auto options =
      tensor.options().device(c10::kCPU).requires_grad(false).pinned_memory(tensor.is_cuda());
  return at::empty(tensor.sizes(), options).copy_(tensor.detach());
}

void check_message(const std::string& name, const Tensor& tensor) {
  if (!tensor.defined()) throw ConfigError(name + " was given a tensor that is undefined.");
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta() || tensor.is_nested() ||
      tensor.key_set().has(c10::DispatchKey::Python) || !tensor.has_storage()) {
    throw ConfigError(name + " was given a tensor that is not dense (" + tensor.toString() +
                      ") or has no values of its own: convert it first.");
  }
  if (tensor.dim() > MessageHeader::kMostDims) {
    throw ConfigError(name + " was given a tensor of " + std::to_string(tensor.dim()) + " dimensions: " +
                      std::to_string(MessageHeader::kMostDims) + " at most can be told; reshape it.");
  }
}

}  // namespace reef
