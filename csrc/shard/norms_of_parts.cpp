#include "shard/norms_of_parts.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "fork.h"
#include "observer/call.h"
#include "page/storage_access.h"
#include "shard/flat.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kMessage =
    "the norm of gradients of parts was asked for, of which each rank has others (reef::shard): take that of "
    "the "
    "whole gradient, by reef::clip_grad_norm_(parameters(), max_norm, group)";

}  // namespace

/// Hears of operators for all of these.
class NormsOfParts::Listener final : public OperatorListener {
 public:
  void add(const NormsOfParts& norms) {
    const std::lock_guard lock(mutex_);
    all_.push_back(&norms);
  }
  void remove(const NormsOfParts& norms) {
    const std::lock_guard lock(mutex_);
    std::erase(all_, &norms);
  }

  bool begins(OperatorCall& call) override {
    if (call.op.name != "aten::_foreach_norm") return false;
    for (const c10::IValue& input : call.call.inputs()) {
      any_tensor(input, [&](const Tensor& tensor) {
        if (is_of_parts(tensor)) refused().push_back(tensor);
        return false;
      });
    }
    for (const Tensor& tensor : refused()) refuse_access(*tensor.storage().unsafeGetStorageImpl(), kMessage);
    return !refused().empty();
  }

  void ends(OperatorCall&) noexcept override {
    for (const Tensor& tensor : std::exchange(refused(), {}))
      allow_access(*tensor.storage().unsafeGetStorageImpl());
  }

 private:
  static std::vector<Tensor>& refused() {
    static thread_local std::vector<Tensor> tensors;
    return tensors;
  }

  bool is_of_parts(const Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    return std::any_of(all_.begin(), all_.end(), [&](const NormsOfParts* norms) {
      return std::any_of(norms->parts_.begin(), norms->parts_.end(),
                         [&](const Tensor& part) { return same_memory(part.grad(), tensor); });
    });
  }

  MutexAtFork mutex_{AtFork::Order::kTables};
  std::vector<const NormsOfParts*> all_;
};

NormsOfParts::Listener& NormsOfParts::listener() {
  static auto* const only = new Listener;
  return *only;
}

NormsOfParts::NormsOfParts(std::vector<Tensor> parts) : parts_(std::move(parts)), observation_(listener()) {
  listener().add(*this);
}

NormsOfParts::~NormsOfParts() { listener().remove(*this); }

}  // namespace reef
