#include "checkpoint/writes_undone.h"

#include <ATen/core/grad_mode.h>

#include "reef/checkpoint.h"

namespace reef {
namespace {

thread_local WritesUndone* innermost_undone = nullptr;  ///< of this thread, the innermost

}  // namespace

WritesUndone::WritesUndone() : ObservedRun(Kind::kUndone), outer_scope_(innermost_undone) {
  innermost_undone = this;
}

WritesUndone::~WritesUndone() {
  const Unobserved unobserved;
  const at::NoGradGuard no_grad;
  for (const auto& [storage, copy] : written_) copy.put_back();
  for (auto version = versions_.rbegin(); version != versions_.rend(); ++version) {
    version->counter.set_version(version->then);
  }
  innermost_undone = outer_scope_;
}

bool WritesUndone::is_in_force() { return innermost_undone != nullptr; }

bool WritesUndone::puts_back(const at::Tensor& tensor) {
  return innermost_undone != nullptr && tensor.has_storage() &&
         innermost_undone->written_.contains(tensor.storage().unsafeGetStorageImpl());
}

// What has been made since is written as often as one likes.
void WritesUndone::about_to_run(const OperatorCall& call) {
  if (call.op.writes_arguments == 0) return;
  found_in(call, [&](const at::Tensor& tensor, std::size_t argument) {
    // Of parameters only what an operator says: of one that may lie, copying them all would cost too much.
    const bool writes = tensor.requires_grad() ? call.op.says_it_writes(argument) : call.op.writes(argument);
    if (writes && tensor.is_leaf()) about_to_write(tensor);
  });
}

void WritesUndone::about_to_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
    versions_.push_back({counter, counter.current_version()});
  }
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (written_.contains(storage)) return;
  const Unobserved unobserved;
  written_.emplace(storage, StorageCopy(tensor.storage()));
}

bool is_undone() { return WritesUndone::is_in_force(); }
bool is_run_again() { return ObservedRun::innermost_is_again(); }

}  // namespace reef
