#include "page/observe_pages.h"

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>

#include <array>
#include <mutex>

#include "ledger/blocks.h"
#include "observer/call.h"
#include "observer/observer.h"
#include "page/pager.h"

namespace reef {
namespace {

using Register = Pager::Register;
using Uses = c10::SmallVector<Pager::Use, 8>;

void add_dense(Uses& uses, const at::Tensor& tensor, bool writes, c10::Device device) {
  if (!tensor.has_storage() || tensor.device() != device) return;
  uses.push_back(
      {tensor.storage().unsafeGetStorageImpl(), writes, tensor.requires_grad() && tensor.is_leaf()});
}

// A sparse tensor has no storage: its parts do.
void add(Uses& uses, const c10::IValue& value, bool writes, c10::Device device) {
  any_tensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return false;
    if (tensor.layout() == c10::kSparse) {
      const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
      add_dense(uses, sparse->indices(), writes, device);
      add_dense(uses, sparse->values(), writes, device);
    } else if (at::sparse_csr::is_sparse_compressed(tensor)) {
      const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
      add_dense(uses, sparse->compressed_indices(), writes, device);
      add_dense(uses, sparse->plain_indices(), writes, device);
      add_dense(uses, sparse->values(), writes, device);
    } else {
      add_dense(uses, tensor, writes, device);
    }
    return false;
  });
}

// Autograd may save what a recorded operator reads and makes. Without recording, what an optimizer makes in
// the likeness of a parameter or a gradient, or writes beside one, is its state.
Register what_to_register(const OperatorCall& call) {
  if (call.in_backward || call.records_gradient) return Register::kAll;
  return call.op.writes_arguments != 0 ? Register::kWrittenWithAKnown : Register::kNone;
}

class PageListener final : public OperatorListener {
 public:
  explicit PageListener(Pager& pager) : pager_(pager), device_(pager.device()) {}
  bool needs_outputs() const override { return true; }

  bool begins(OperatorCall& call) override {
    if (!call.op.touches_memory) return false;
    Uses uses;
    const auto inputs = call.call.inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) add(uses, inputs[i], call.op.writes(i), device_);
    pager_.this_threads_frame().enter(pager_, call, what_to_register(call), uses);
    return true;
  }

  void ends(OperatorCall& call) noexcept override {
    Uses results;
    for (const c10::IValue& output : call.call.outputs()) add(results, output, false, device_);
    pager_.this_threads_frame().leave(pager_, call, what_to_register(call), results);
  }

 private:
  Pager& pager_;
  c10::Device device_;
};

// Never destroyed: an operator that it heard begin may end at any time.
PageListener& listener_of(Pager& pager) {
  static auto* const mutex = new std::mutex;
  static std::array<PageListener*, kDeviceSlots> listeners{};
  const std::lock_guard lock(*mutex);
  PageListener*& listener = listeners[*slot_of(pager.device())];
  if (listener == nullptr) listener = new PageListener(pager);
  return *listener;
}

}  // namespace

PageObservation::PageObservation(Pager& pager) : operators_(listener_of(pager)) {}

}  // namespace reef
