#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace reef {

class SliceExchange;

/// Ranks exchange numbers that their hosts know, so that all decide alike. That need not make a host wait for
/// its device.

/// Returns the device by way of which the hosts of a group exchange numbers if their tensors are on `device`.
/// It is the CPU if the group sends messages for it (by_messages()), so that no host waits; otherwise it is
/// `device`, or one for which the group has a backend.
c10::Device device_of_host_numbers(c10d::ProcessGroup& group, c10::Device device);

/// Copies `on_host` into page-locked memory if `device` is a CUDA device, so that copies to and from it do
/// not make the host wait. Otherwise returns the tensor itself.
at::Tensor page_locked(const at::Tensor& on_host, c10::Device device);

/// Copies a tensor to the host, which waits for the device once. A tensor on the CPU is returned itself.
at::Tensor read_by_host(const at::Tensor& tensor);

/// Replaces each of `values`, which are page_locked(), by the largest of all ranks, by way of `device`
/// (device_of_host_numbers()). If `last` is defined, it is a number on the device that takes the place of the
/// last value. Called by a lane; the host may read the values after CommLane::wait_on_host().
void largest_of_hosts(SliceExchange& ranks, const at::Tensor& values, c10::Device device,
                      const at::Tensor& last = {});

}  // namespace reef
