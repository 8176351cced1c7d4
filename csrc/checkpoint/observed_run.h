#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <unordered_map>
#include <vector>

#include "observer/call.h"
#include "observer/observer.h"

namespace reef {

/// One run of a function on this thread: while one lives, it hears of operators that read or write memory. Of
/// what an operator with a kernel of its own does inside, with memory that nobody has seen, it does not. Runs
/// nest; what is undone is heard of no further out.
class ObservedRun {
 public:
  ObservedRun(const ObservedRun&) = delete;
  ObservedRun& operator=(const ObservedRun&) = delete;

  /// Whether the operator that runs in the innermost of this thread still has to write into `saved`, which
  /// autograd saves before it does. Not of memory that was there before: what was left there is put back.
  static bool is_unfinished(const at::Tensor& saved);

  /// Memory. Weak, so that no address comes a second time.
  using Made = std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;

  /// Whether the innermost of this thread is one that is undone or made again.
  static bool innermost_is_again();

  /// While what it gives lives, runs begin and end without asking LibTorch to be heard anew.
  static OperatorObservation observation();

  /// Throws what has failed while it heard of an operator, whose caller does not hear of that.
  void check() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 protected:
  /// kUndone: by itself. kAgain: within one that is undone.
  enum class Kind : std::uint8_t { kFirst, kUndone, kAgain };
  explicit ObservedRun(Kind kind);
  ~ObservedRun();
  std::exception_ptr failure() const { return failure_; }

  virtual void about_to_run(const OperatorCall& call) = 0;

  /// Whether an operator of this run made that memory.
  bool has_made(const c10::StorageImpl& storage) const { return made_.contains(&storage); }
  /// Calls `visit` with every tensor among the arguments that has memory which this run has not made, and
  /// with the argument's number.
  template <class Visit>
  void found_in(const OperatorCall& call, const Visit& visit) const {
    const auto inputs = call.call.inputs();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      any_tensor(inputs[i], [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage() && !has_made(*tensor.storage().unsafeGetStorageImpl()))
          visit(tensor, i);
        return false;
      });
    }
  }

  const Made& made() const { return made_; }

  /// While one lives, no run of this thread hears of anything.
  class Unobserved {
   public:
    Unobserved();
    ~Unobserved();
    Unobserved(const Unobserved&) = delete;
    Unobserved& operator=(const Unobserved&) = delete;

   private:
    ObservedRun* innermost_;
  };

 private:
  class Listener;
  static Listener& listener();
  static ObservedRun*& innermost();
  void begins(const OperatorCall& call) noexcept;
  void ends(const OperatorCall& call) noexcept;
  ObservedRun* next() const { return kind_ == Kind::kUndone ? nullptr : outer_; }

  ObservedRun* outer_;
  Kind kind_;
  int depth_ = 0;
  std::exception_ptr failure_;
  std::vector<const c10::StorageImpl*> given_;    ///< to the operator that runs
  std::vector<const c10::StorageImpl*> writing_;  ///< of these, what it writes
  Made made_;
  OperatorObservation observation_;
};

}  // namespace reef
