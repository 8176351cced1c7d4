#include "ledger/observe.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <memory>
#include <mutex>

#include "ledger/birth.h"
#include "ledger/blocks.h"
#include "ledger/watch.h"
#include "observer/call.h"
#include "observer/operator_table.h"

namespace reef {

Birth& this_threads_birth() {
  static thread_local Birth birth;
  return birth;
}

Category birth_category() {
  const Birth& birth = this_threads_birth();
  if (birth.scope != Birth::kNoScope) return static_cast<Category>(birth.scope);
  return birth.category;
}

namespace {

const void* data_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

// An optimizer's step is the writing of parameters with grad mode off, outside backward.
void announce_written_parameters(const Operator& op, const at::RecordFunction& call) {
  const auto inputs = call.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!op.writes(i)) continue;
    any_tensor(inputs[i], [](const at::Tensor& t) {
      const void* data = data_of(t);
      if (data != nullptr && Blocks::instance().category_of(data) == Category::kParameter)
        parameter_written(t);
      return false;
    });
  }
}

// Lives from the start of an outermost operator (or accumulation) to its end and puts the thread's birth
// back. The end callback of a nested call has none, so nothing depends on calls ending in the order in which
// they began.
struct Outermost : at::ObserverContext {
  explicit Outermost(const Birth& before) : previous(before) {}
  Birth previous;
};

std::unique_ptr<at::ObserverContext> enter(const std::string* op, Category category) {
  Birth& birth = this_threads_birth();
  auto outermost = std::make_unique<Outermost>(birth);
  birth.op = op;
  birth.category = category;
  return outermost;
}

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction& call) {
  if (this_threads_birth().op != nullptr) return nullptr;
  const Operator& op = operator_of(call);
  if (!op.is_operator) return nullptr;
  const bool backward = in_backward();
  const std::string* const shown = backward ? &op.name_in_backward : &op.name;
  if (op.is_collective) return enter(shown, Category::kCommunication);
  if (backward) return enter(shown, Category::kActivation);
  if (records_gradient(call)) return enter(shown, Category::kActivation);
  if (op.writes_arguments != 0 && !c10::GradMode::is_enabled()) announce_written_parameters(op, call);
  return enter(shown, Category::kOther);
}

// autograd gives the gradient of a leaf to its AccumulateGrad node, which keeps the tensor itself as `.grad`,
// or a copy born there, or adds it to the `.grad` that exists.
std::unique_ptr<at::ObserverContext> node_starts(const at::RecordFunction& call) {
  if (std::strcmp(call.name(), "torch::autograd::AccumulateGrad") != 0) return nullptr;
  for (const c10::IValue& input : call.inputs()) {
    any_tensor(input, [](const at::Tensor& gradient) {
      if (const void* data = data_of(gradient)) Blocks::instance().mark(data, Category::kGradient);
      return false;
    });
  }
  static const auto* const kName = new std::string("torch::autograd::AccumulateGrad (backward)");
  return enter(kName, Category::kGradient);
}

std::unique_ptr<at::ObserverContext> starts(const at::RecordFunction& call) {
  return call.scope() == at::RecordScope::FUNCTION ? operator_starts(call) : node_starts(call);
}

void ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  Birth& birth = this_threads_birth();
  const Birth& previous = static_cast<Outermost*>(context)->previous;
  birth.op = previous.op;
  birth.category = previous.category;
}

std::mutex observation_mutex;
int observations = 0;
at::CallbackHandle observation_handle = 0;

}  // namespace

Observation::Observation() {
  const std::lock_guard lock(observation_mutex);
  if (observations++ > 0) return;
  observation_handle =
      at::addGlobalCallback(at::RecordFunctionCallback(starts, ends)
                                .needsInputs(true)
                                .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

Observation::~Observation() {
  const std::lock_guard lock(observation_mutex);
  if (--observations == 0) at::removeCallback(observation_handle);
}

}  // namespace reef
