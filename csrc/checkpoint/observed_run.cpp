#include "checkpoint/observed_run.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace reef {

class ObservedRun::Listener final : public OperatorListener {
 public:
  bool needs_outputs() const override { return true; }
  bool listens() const override { return innermost() != nullptr; }

  bool begins(OperatorCall& call) override {
    if (innermost() == nullptr || !call.op.touches_memory()) return false;
    for (ObservedRun* run = innermost(); run != nullptr; run = run->next()) run->begins(call);
    return true;
  }

  void ends(OperatorCall& call) noexcept override {
    for (ObservedRun* run = innermost(); run != nullptr; run = run->next()) run->ends(call);
  }
};

// Never destroyed: an operator that it heard begin may end at any time.
ObservedRun::Listener& ObservedRun::listener() {
  static auto* const one = new Listener;
  return *one;
}

ObservedRun*& ObservedRun::innermost() {
  static thread_local ObservedRun* of_thread = nullptr;
  return of_thread;
}

ObservedRun::ObservedRun(Kind kind) : outer_(innermost()), kind_(kind), observation_(listener()) {
  innermost() = this;
}
ObservedRun::~ObservedRun() { innermost() = outer_; }

OperatorObservation ObservedRun::observation() { return OperatorObservation(listener()); }

// A second run is made in grad mode; without it, something else is run inside.
bool ObservedRun::innermost_is_again() {
  const ObservedRun* const run = innermost();
  return run != nullptr &&
         (run->kind_ == Kind::kUndone || (run->kind_ == Kind::kAgain && at::GradMode::is_enabled()));
}

bool ObservedRun::is_unfinished(const at::Tensor& saved) {
  const ObservedRun* const run = innermost();
  if (run == nullptr || !saved.defined() || !saved.has_storage()) return false;
  const c10::StorageImpl& storage = *saved.storage().unsafeGetStorageImpl();
  return run->has_made(storage) &&
         std::find(run->writing_.begin(), run->writing_.end(), &storage) != run->writing_.end();
}

ObservedRun::Unobserved::Unobserved() : innermost_(std::exchange(innermost(), nullptr)) {}
ObservedRun::Unobserved::~Unobserved() { innermost() = innermost_; }

void ObservedRun::begins(const OperatorCall& call) noexcept {
  if (depth_++ > 0) return;
  try {
    given_.clear();  // arguments are gone when it ends
    writing_.clear();
    const auto inputs = call.call.inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      any_tensor(inputs[i], [&](const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.has_storage()) return false;
        given_.push_back(tensor.storage().unsafeGetStorageImpl());
        if (call.op.says_it_writes(i)) writing_.push_back(given_.back());
        return false;
      });
    }
    about_to_run(call);
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}

// What an operator gives is new, unless it is what it was given.
void ObservedRun::ends(const OperatorCall& call) noexcept {
  if (depth_ == 0 || --depth_ > 0) return;  // 0: it began before this did
  writing_.clear();
  for (const c10::IValue& output : call.call.outputs()) {
    any_tensor(output, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.has_storage()) return false;
      const c10::Storage& storage = tensor.storage();
      const c10::StorageImpl* const address = storage.unsafeGetStorageImpl();
      if (std::find(given_.begin(), given_.end(), address) == given_.end())
        made_.insert_or_assign(address, storage.getWeakStorageImpl());
      return false;
    });
  }
}

}  // namespace reef
