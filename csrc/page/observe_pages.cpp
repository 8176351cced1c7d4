#include "page/observe_pages.h"

#include <ATen/record_function.h>

#include <memory>
#include <mutex>

#include "observer/call.h"
#include "observer/operator_table.h"
#include "page/pager.h"

namespace reef {
namespace {

using Register = Pager::Register;
using Uses = c10::SmallVector<Pager::Use, 8>;

void add(Uses& uses, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.device().is_cpu()) return;
  uses.push_back(
      {tensor.storage().unsafeGetStorageImpl(), writes, tensor.requires_grad() && tensor.is_leaf()});
}

// Autograd may save what a recorded operator reads and makes. Without recording, what an optimizer makes in
// the likeness of a parameter or a gradient, or writes beside one, is its state.
Pager::Call describe(const Operator& op, const at::RecordFunction& call) {
  const bool backward = in_backward();
  const bool recorded = !backward && records_gradient(call);
  const Register what = backward || recorded       ? Register::kAll
                        : op.writes_arguments != 0 ? Register::kWrittenWithAKnown
                                                   : Register::kNone;
  return {op.name, what, backward, recorded};
}

struct Running : at::ObserverContext {
  explicit Running(const Pager::Call& of) : call(of) {}
  Pager::Call call;
};

std::unique_ptr<at::ObserverContext> starts(const at::RecordFunction& call) {
  const Operator& op = operator_of(call);
  if (!op.touches_memory) return nullptr;
  auto running = std::make_unique<Running>(describe(op, call));
  Uses uses;
  const auto inputs = call.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const bool writes = op.writes(i);
    any_tensor(inputs[i], [&](const at::Tensor& tensor) {
      add(uses, tensor, writes);
      return false;
    });
  }
  const bool known = Pager::this_threads_frame().enter(running->call, uses);
  if (known && op.makes_alike) running->call.what = Register::kAll;
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
  Pager::this_threads_frame().leave(static_cast<Running*>(context)->call, results);
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
