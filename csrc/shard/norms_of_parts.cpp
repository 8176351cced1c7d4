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
    const What what = what_is(call.op.name);
    if (what == What::kOther) return false;
    ThisThreads& mine = this_threads();
    if (what == What::kOfEach) return reaches_parts(call, mine);
    for (const c10::IValue& input : call.call.inputs()) {
      any_tensor(input, [&](const Tensor& tensor) {
        if (what == What::kOfAll ? is_of_parts(tensor) : mine.knows(tensor)) mine.refused.push_back(tensor);
        return false;
      });
    }
    for (const Tensor& tensor : mine.refused)
      refuse_access(*tensor.storage().unsafeGetStorageImpl(), kMessage);
    return !mine.refused.empty();
  }

  bool needs_outputs() const override { return true; }
  void ends(OperatorCall& call) noexcept override {
    ThisThreads& mine = this_threads();
    for (const Tensor& tensor : std::exchange(mine.refused, {}))
      allow_access(*tensor.storage().unsafeGetStorageImpl());
    if (what_is(call.op.name) == What::kOfEach) mine.note(call.call.outputs());
  }

 private:
  enum class What : std::uint8_t {
    kOther,
    kOfAll,   ///< takes the norms of many
    kOfEach,  ///< takes the norm of one, or is on the way to it
    kJoins,   ///< puts many into one, as norms are before that of all is taken
  };
  static What what_is(const std::string& op) {
    if (op == "aten::_foreach_norm") return What::kOfAll;
    if (op == "aten::stack" || op == "aten::cat") return What::kJoins;
    const bool of_each = op == "aten::linalg_vector_norm" || op == "aten::norm" || op == "aten::abs" ||
                         op == "aten::max" || op == "aten::amax";
    return of_each ? What::kOfEach : What::kOther;
  }

  struct ThisThreads {
    std::vector<Tensor> refused;                                  ///< by the operator that runs
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> norms;  ///< of parts' gradients, or on the way

    bool knows(const Tensor& tensor) const {
      return std::any_of(norms.begin(), norms.end(), [&](const auto& norm) {
        return !norm.expired() && norm._unsafe_get_target() == tensor.unsafeGetTensorImpl();
      });
    }
    void note(c10::ArrayRef<c10::IValue> made) {
      std::erase_if(norms, [](const auto& norm) { return norm.expired(); });
      for (const c10::IValue& output : made) {
        if (output.isTensor() && output.toTensor().defined())
          norms.emplace_back(output.toTensor().getIntrusivePtr());
      }
    }
  };
  static ThisThreads& this_threads() {
    static thread_local ThisThreads mine;
    return mine;
  }

  bool reaches_parts(const OperatorCall& call, const ThisThreads& mine) {
    const auto inputs = call.call.inputs();
    if (inputs.empty() || !inputs[0].isTensor()) return false;
    const Tensor& of = inputs[0].toTensor();
    return of.defined() && (mine.knows(of) || is_of_parts(of));
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
