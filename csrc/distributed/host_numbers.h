#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace reef {

class SliceExchange;

/// Where numbers of the hosts go, by which all ranks decide alike, if their tensors are on `device`: the CPU,
/// where ranks have messages for it (by_messages()), so that no host waits for its device; else that device,
/// or one that the group has a backend for.
c10::Device device_of_host_numbers(c10d::ProcessGroup& group, c10::Device device);

/// The same in memory from which a copy to `device` is only queued, and into which one from there. On the CPU
/// the tensor itself.
at::Tensor page_locked(const at::Tensor& on_host, c10::Device device);

/// What is on a device, for the host, which waits for it once. On the CPU the tensor itself.
at::Tensor read_by_host(const at::Tensor& tensor);

/// SliceExchange::largest() of numbers on the host, by way of `device`, which is device_of_host_numbers().
/// The last of them is `last`, if that is defined, a number on the device. Work of a lane: they are there
/// when the host has waited for it (CommLane::wait_on_host()), for which they are page_locked().
void largest_of_hosts(SliceExchange& ranks, const at::Tensor& values, c10::Device device,
                      const at::Tensor& last = {});

}  // namespace reef
