#include "page/observe_pages.h"

#include <ATen/record_function.h>

#include <memory>
#include <mutex>

#include "observer/call.h"
#include "observer/operator_table.h"
#include "page/pager.h"

namespace reef {
namespace {

using Frame = Pager::Frame;
using Register = Frame::Register;
using Uses = c10::SmallVector<Frame::Use, 8>;

void add(Uses& uses, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return;
  uses.push_back({tensor.storage().unsafeGetStorageImpl(), writes});
}

// Autograd may save what a recorded operator reads and makes. Without recording, what an optimizer makes in
// the likeness of a parameter or a gradient, or writes beside one, is its state.
Register what_to_register(const Operator& op, const at::RecordFunction& call) {
  if (in_backward() || records_gradient(call)) return Register::kAll;
  return op.writes_arguments != 0 ? Register::kWrittenWithAKnown : Register::kNone;
}

struct Running : at::ObserverContext {
  explicit Running(Register how) : what(how) {}
  Register what;
};

std::unique_ptr<at::ObserverContext> starts(const at::RecordFunction& call) {
  const Operator& op = operator_of(call);
  if (!op.touches_memory) return nullptr;
  auto running = std::make_unique<Running>(what_to_register(op, call));
  Uses uses;
  const auto inputs = call.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool writes = op.writes(i);
    any_tensor(inputs[i], [&](const at::Tensor& tensor) {
      add(uses, tensor, writes);
      return false;
    });
  }
  const bool known = Pager::this_threads_frame().enter(uses, running->what);
  if (known && op.makes_alike) running->what = Register::kAll;
  return running;
}

void ends(const at::RecordFunction& call, at::ObserverContext* context) {
  if (context == nullptr) return;
  Uses results;
  for (const c10::IValue& output : call.outputs()) {
    any_tensor(output, [&](const at::Tensor& tensor) {
      add(results, tensor, false);
      return false;
    });
  }
  Pager::this_threads_frame().leave(results, static_cast<Running*>(context)->what);
}

std::mutex observation_mutex;
int observations = 0;
at::CallbackHandle observation_handle = 0;

}  // namespace

PageObservation::PageObservation() {
  const std::lock_guard lock(observation_mutex);
  if (observations++ > 0) return;
  observation_handle = at::addGlobalCallback(at::RecordFunctionCallback(starts, ends)
                                                 .needsInputs(true)
                                                 .needsOutputs(true)
                                                 .scopes({at::RecordScope::FUNCTION}));
}

PageObservation::~PageObservation() {
  const std::lock_guard lock(observation_mutex);
  if (--observations == 0) at::removeCallback(observation_handle);
}

}  // namespace reef
