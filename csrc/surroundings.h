#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <vector>

namespace reef {

/// What a function depends on besides its inputs and what it has captured: where the default generators are,
/// and how autocast is set. As of the moment of construction, on this thread.
class Surroundings {
 public:
  /// The CPU's generator, and those of these devices.
  explicit Surroundings(const std::vector<c10::Device>& devices);

  /// Generators that have not moved since need no state, which is some kilobytes.
  void forget_unmoved_generators();

 private:
  friend class SurroundingsScope;
  struct GeneratorState {
    c10::Device device;
    at::Tensor state;
  };
  struct Autocast {
    c10::DeviceType device;
    bool enabled;
    at::ScalarType dtype;
  };
  void apply() const;
  std::vector<c10::Device> devices() const;

  std::vector<GeneratorState> generators_;
  std::vector<Autocast> autocast_;
};

/// While one lives, all is as it was then; afterwards, as it was before the scope. Casts of autocast are not
/// cached: they would outlive the scope.
class SurroundingsScope {
 public:
  explicit SurroundingsScope(const Surroundings& then);
  ~SurroundingsScope();
  SurroundingsScope(const SurroundingsScope&) = delete;
  SurroundingsScope& operator=(const SurroundingsScope&) = delete;

 private:
  Surroundings now_;
  bool cache_enabled_;
};

/// The devices other than the CPU that these are on, and `devices`.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors,
                                    std::vector<c10::Device> devices = {});

}  // namespace reef
