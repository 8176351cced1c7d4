#include "page/observe_pages.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "fork.h"
#include "ledger/blocks.h"
#include "observer/call.h"
#include "observer/observer.h"
#include "page/collective_work.h"
#include "page/pager.h"

namespace reef {
namespace {

using Register = Pager::Register;
using Uses = c10::SmallVector<Pager::Use, 8>;

// The dispatch keys of LibTorch's own tensors that have memory.
constexpr c10::DispatchKeySet kPlain = c10::DispatchKeySet(
    {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
     c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU,
     c10::DispatchKey::AutocastCUDA, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// Whether only LibTorch's kernel runs inside the call: no mode, no transform and no hook of the program.
// Operators that the kernel calls then use only its arguments and memory that it has made.
bool is_closed(const OperatorCall& call) {
  if (!call.op.is_of_torch || c10::impl::dispatch_mode_enabled()) return false;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PythonTLSSnapshot) ||
      !at::SavedTensorDefaultHooks::get_tls_state().stack.empty())
    return false;
  const auto inputs = call.call.inputs();
  return std::none_of(inputs.begin(), inputs.end(), [](const c10::IValue& input) {
    return any_tensor(input, [](const at::Tensor& tensor) {
      return tensor.defined() && !(tensor.key_set() - kPlain).empty();
    });
  });
}

// Calls no function that a subclass may override, because that could raise or call operators.
void add_dense(Uses& uses, const at::Tensor& tensor, bool writes, c10::Device device) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  c10::StorageImpl* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || storage->device() != device) return;
  uses.push_back({storage, writes, tensor.requires_grad() && tensor.is_leaf()});
}

// A sparse tensor has no storage of its own, but its parts do. Many wrapper subclasses have sparse dispatch
// keys, so the class of the tensor decides.
void add_tensor(Uses& uses, const at::Tensor& tensor, bool writes, c10::Device device) {
  if (!tensor.defined()) return;
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (!impl->key_set().has_any(c10::sparse_ks | c10::sparse_csr_ks)) {
    add_dense(uses, tensor, writes, device);
  } else if (const auto* coo = dynamic_cast<const at::SparseTensorImpl*>(impl)) {
    add_dense(uses, coo->indices(), writes, device);
    add_dense(uses, coo->values(), writes, device);
  } else if (const auto* compressed = dynamic_cast<const at::SparseCsrTensorImpl*>(impl)) {
    add_dense(uses, compressed->compressed_indices(), writes, device);
    add_dense(uses, compressed->plain_indices(), writes, device);
    add_dense(uses, compressed->values(), writes, device);
  }
}

void add(Uses& uses, const c10::IValue& value, bool writes, c10::Device device) {
  any_tensor(value, [&](const at::Tensor& tensor) {
    add_tensor(uses, tensor, writes, device);
    return false;
  });
}

void add_inputs(Uses& uses, const OperatorCall& call, c10::Device device) {
  const auto inputs = call.call.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) add(uses, inputs[i], call.op.writes(i), device);
}

// An operator of LibTorch that only calls others runs on any device. So it reads no memory by itself, except
// for lengths and indices that must be on the CPU.
void add_integers(Uses& uses, const OperatorCall& call, c10::Device device) {
  for (const c10::IValue& input : call.call.inputs()) {
    any_tensor(input, [&](const at::Tensor& tensor) {
      if (tensor.defined() && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true))
        add_tensor(uses, tensor, /*writes=*/false, device);
      return false;
    });
  }
}

// Autograd may save what a recorded operator reads and makes.
Register what_to_register(const OperatorCall& call) {
  return call.in_backward || call.records_gradient ? Register::kAll : Register::kNone;
}

class PageListener final : public OperatorListener {
 public:
  explicit PageListener(Pager& pager) : pager_(pager), device_(pager.device()) {}
  bool needs_outputs() const override { return true; }
  bool hears_ranges() const override { return true; }
  bool listens() const override { return !pager_.this_threads_frame().closed; }

  bool begins(OperatorCall& call) override {
    const Operator& op = call.op;
    if (op.is_view) return false;
    Uses uses;
    if (op.touches_memory()) {
      add_inputs(uses, call, device_);
      pager_.enter(call, what_to_register(call), uses);
      Frame& frame = pager_.this_threads_frame();
      frame.closed = frame.depth == 1 && is_closed(call);
      return true;
    }
    op.is_operator&& op.is_of_torch ? add_integers(uses, call, device_) : add_inputs(uses, call, device_);
    const bool keeps = op.is_operator && !op.is_of_torch;
    if (uses.empty() && !keeps) return false;
    if (op.is_of_reducer) pager_.keep(uses);  // The reducer compares their addresses between operators.
    pager_.enter_around(call, keeps, uses);
    return true;
  }

  void ends(OperatorCall& call) noexcept override {
    pager_.this_threads_frame().closed = false;
    if (!call.op.touches_memory()) return pager_.leave_around(call);
    Uses results;
    try {
      for (const c10::IValue& output : call.call.outputs()) add(results, output, false, device_);
    } catch (...) {  // A subclass may throw; the results found so far are used.
    }
    if (!call.op.is_collective) return pager_.leave(call, what_to_register(call), results);
    Pager::LetGo let_go;
    pager_.leave(call, what_to_register(call), results, &let_go);
    if (!let_go) return;
    try {
      when_over(call.call.outputs(), let_go);
    } catch (...) {  // Its end cannot be observed, so its tensors stay in memory forever.
    }
  }

 private:
  Pager& pager_;
  c10::Device device_;
};

// Never destroyed, because an operator whose beginning it has observed may end at any time.
PageListener& listener_of(Pager& pager) {
  static auto* const mutex = new MutexAtFork(AtFork::Order::kTables);
  static std::array<PageListener*, kDeviceSlots> listeners{};
  const std::lock_guard lock(*mutex);
  PageListener*& listener = listeners[*slot_of(pager.device())];
  if (listener == nullptr) listener = new PageListener(pager);
  return *listener;
}

}  // namespace

PageObservation::PageObservation(Pager& pager) : operators_(listener_of(pager)) {}

}  // namespace reef
