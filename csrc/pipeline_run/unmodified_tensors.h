#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace reef {

/// Tells whether tensors have been modified in place since they were added.
template <class Label>
class UnmodifiedTensors {
 public:
  /// Keeps no tensor. Does nothing for one that is undefined, or made in inference mode, which has no count
  /// of modifications.
  void add(const at::Tensor& tensor, Label label) {
    if (!tensor.defined() || tensor.is_inference()) return;
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    noted_.push_back({counter, counter.current_version(), std::move(label)});
  }
  /// Returns the label of the first that has been modified; nullptr if none has.
  const Label* find_modified() const {
    for (const Noted& each : noted_) {
      if (each.counter.current_version() != each.version) return &each.label;
    }
    return nullptr;
  }
  void clear() { noted_.clear(); }

 private:
  struct Noted {
    c10::VariableVersion counter;
    std::uint32_t version;
    Label label;
  };
  std::vector<Noted> noted_;
};

}  // namespace reef
