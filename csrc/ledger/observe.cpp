#include "ledger/observe.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "fork.h"
#include "ledger/birth.h"
#include "ledger/blocks.h"
#include "ledger/watch.h"
#include "observer/call.h"
#include "observer/global_callback.h"
#include "observer/observer.h"

namespace reef {

namespace {

// Small enough for the static block, which is found without a call.
[[gnu::tls_model("initial-exec")]] constinit thread_local Birth birth;

}  // namespace

Birth& this_threads_birth() { return birth; }

Category birth_category() {
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

void enter(const std::string* op, Category category) {
  birth.op = op;
  birth.category = category;
}

// Outside every operator.
void leave() { enter(nullptr, Category::kOther); }

// Only the outermost call hears of its end, so nothing depends on calls ending in the order in which they
// began.
class LedgerListener final : public OperatorListener {
 public:
  bool listens() const override { return birth.op == nullptr; }

  bool begins(OperatorCall& call) override {
    const Operator& op = call.op;
    const std::string* const shown = call.in_backward ? &op.name_in_backward : &op.name;
    if (op.is_collective) {
      enter(shown, Category::kCommunication);
    } else if (call.in_backward || call.records_gradient) {
      enter(shown, Category::kActivation);
    } else {
      if (op.writes_arguments != 0 && !c10::GradMode::is_enabled())
        announce_written_parameters(op, call.call);
      enter(shown, Category::kOther);
    }
    return true;
  }
  void ends(OperatorCall&) noexcept override { leave(); }
};

LedgerListener& listener() {
  static auto* const heard = new LedgerListener;
  return *heard;
}

struct Observations {
  MutexAtFork mutex{AtFork::Order::kTables};
  std::atomic<int> count = 0;
  GlobalCallback of_nodes;
};
Observations& observations() {
  static auto* const all = new Observations;
  return *all;
}

struct Node : at::ObserverContext {};

// autograd gives the gradient of a leaf to its AccumulateGrad node, which keeps the tensor itself as `.grad`,
// or a copy born there, or adds it to the `.grad` that exists.
std::unique_ptr<at::ObserverContext> node_starts(const at::RecordFunction& call) {
  if (observations().count == 0 || birth.op != nullptr ||
      std::strcmp(call.name(), "torch::autograd::AccumulateGrad") != 0)
    return nullptr;
  for (const c10::IValue& input : call.inputs()) {
    any_tensor(input, [](const at::Tensor& gradient) {
      if (const void* data = data_of(gradient)) Blocks::instance().mark(data, Category::kGradient);
      return false;
    });
  }
  static const auto* const kName = new std::string("torch::autograd::AccumulateGrad (backward)");
  enter(kName, Category::kGradient);
  return std::make_unique<Node>();
}

void node_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (context != nullptr) leave();
}

}  // namespace

Observation::Observation() : operators_(listener()) {
  const std::lock_guard lock(observations().mutex);
  if (observations().count++ > 0) return;
  observations().of_nodes.add(at::RecordFunctionCallback(node_starts, node_ends)
                                  .needsInputs(true)
                                  .scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

Observation::~Observation() {
  const std::lock_guard lock(observations().mutex);
  if (--observations().count == 0) observations().of_nodes.remove();
}

}  // namespace reef
