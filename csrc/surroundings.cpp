#include "surroundings.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace reef {
namespace {

at::Tensor state_of(c10::Device device) {
  const at::DisableRecordFunctionGuard unobserved;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(c10::Device device, const at::Tensor& state) {
  const at::DisableRecordFunctionGuard unobserved;
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

Surroundings::Surroundings(const std::vector<c10::Device>& devices) {
  generators_.push_back({c10::kCPU, state_of(c10::kCPU)});
  for (const c10::Device device : devices) generators_.push_back({device, state_of(device)});
  for (const c10::DeviceType device : {c10::kCPU, c10::kCUDA}) {
    autocast_.push_back(
        {device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
  }
}

void Surroundings::forget_unmoved_generators() {
  const at::DisableRecordFunctionGuard unobserved;
  std::erase_if(generators_,
                [](const GeneratorState& then) { return at::equal(state_of(then.device), then.state); });
}

void Surroundings::apply() const {
  for (const GeneratorState& generator : generators_) set_state(generator.device, generator.state);
  for (const Autocast& of : autocast_) {
    at::autocast::set_autocast_enabled(of.device, of.enabled);
    at::autocast::set_autocast_dtype(of.device, of.dtype);
  }
}

std::vector<c10::Device> Surroundings::devices() const {
  std::vector<c10::Device> devices;
  for (const GeneratorState& generator : generators_) {
    if (!generator.device.is_cpu()) devices.push_back(generator.device);
  }
  return devices;
}

SurroundingsScope::SurroundingsScope(const Surroundings& then)
    : now_(then.devices()), cache_enabled_(at::autocast::is_autocast_cache_enabled()) {
  then.apply();
  at::autocast::set_autocast_cache_enabled(false);
}

SurroundingsScope::~SurroundingsScope() {
  now_.apply();
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors,
                                    std::vector<c10::Device> devices) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) devices.push_back(tensor.device());
  }
  std::erase_if(devices, [](c10::Device device) { return device.is_cpu(); });
  const auto in_order = [](c10::Device a, c10::Device b) {
    return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
  };
  std::sort(devices.begin(), devices.end(), in_order);
  devices.erase(std::unique(devices.begin(), devices.end()), devices.end());
  return devices;
}

}  // namespace reef
