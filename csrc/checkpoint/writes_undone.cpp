#include "checkpoint/writes_undone.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "observer/call.h"

namespace reef {
namespace {

/// Of this thread, the innermost; nullptr while it works itself.
thread_local WritesUndone* current = nullptr;

}  // namespace

class WritesUndone::Listener final : public OperatorListener {
 public:
  bool needs_outputs() const override { return true; }

  bool begins(OperatorCall& call) override {
    if (current == nullptr || !call.op.touches_memory()) return false;
    if (current->depth_++ == 0) current->about_to_run(call);
    return true;
  }

  void ends(OperatorCall& call) noexcept override {
    if (current != nullptr && --current->depth_ == 0) current->has_run(call);
  }
};

// Never destroyed: an operator that it heard begin may end at any time.
WritesUndone::Listener& WritesUndone::listener() {
  static auto* const one = new Listener;
  return *one;
}

WritesUndone::WritesUndone() : outer_(current), observation_(listener()) { current = this; }

WritesUndone::~WritesUndone() {
  current = nullptr;
  const at::NoGradGuard no_grad;
  std::for_each(written_.rbegin(), written_.rend(), [](const Written& written) {
    at::Tensor(written.tensor.variable_data()).copy_(written.before);  // and its version counter stays
  });
  current = outer_;
}

bool WritesUndone::puts_back(const at::Tensor& tensor) {
  if (current == nullptr) return false;
  return std::any_of(current->written_.begin(), current->written_.end(),
                     [&](const Written& written) { return written.tensor.is_alias_of(tensor); });
}

void WritesUndone::about_to_run(const OperatorCall& call) {
  const auto inputs = call.call.inputs();
  for (std::size_t i = 0; i < inputs.size() && call.op.writes_arguments != 0; ++i) {
    if (!call.op.writes(i)) continue;
    any_tensor(inputs[i], [&](const at::Tensor& tensor) {
      about_to_write(tensor);
      return false;
    });
  }
}

void WritesUndone::has_run(const OperatorCall& call) {
  if (call.op.writes_arguments != 0) return;  // what it gives is not new
  for (const c10::IValue& output : call.call.outputs()) {
    any_tensor(output, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage()) made_.insert(tensor.storage().unsafeGetStorageImpl());
      return false;
    });
  }
}

// What has been made since is written as often as one likes.
void WritesUndone::about_to_write(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.requires_grad()) return;
  if (made_.contains(tensor.storage().unsafeGetStorageImpl())) return;
  for (const Written& written : written_) {
    if (written.tensor.is_same(tensor)) return;
  }
  current = nullptr;
  const at::NoGradGuard no_grad;
  written_.push_back({tensor, tensor.clone()});
  current = this;
}

}  // namespace reef
