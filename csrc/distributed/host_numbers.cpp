#include "distributed/host_numbers.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "distributed/comm_lane.h"
#include "distributed/slice_exchange.h"

namespace reef {

using at::Tensor;

c10::Device device_of_host_numbers(c10d::ProcessGroup& group, c10::Device device) {
  if (group.getSize() == 1) return c10::kCPU;
  const auto devices = group.getDeviceTypes();
  const bool has_cpu =
      std::any_of(devices.begin(), devices.end(), [](c10::Device each) { return each.is_cpu(); });
  if (device.is_cpu()) return has_cpu || devices.empty() ? device : devices.front();
  return has_cpu && by_messages(group, c10::kCPU) ? c10::Device(c10::kCPU) : device;
}

Tensor page_locked(const Tensor& on_host, c10::Device device) {
  if (!device.is_cuda()) return on_host;
  return at::empty(on_host.sizes(), on_host.options().pinned_memory(true)).copy_(on_host);
}

Tensor read_by_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor.cpu();
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true)).copy_(tensor);
}

void largest_of_hosts(SliceExchange& ranks, const Tensor& values, c10::Device device, const Tensor& last) {
  if (device.is_cpu()) return ranks.largest(values);
  const Tensor there = values.to(device, /*non_blocking=*/true);
  if (last.defined()) there[values.numel() - 1].copy_(last);
  ranks.largest(there);
  values.copy_(there, /*non_blocking=*/true);
}

}  // namespace reef
