#pragma once

#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>

#include "observer/operator_table.h"

namespace reef {

/// An operator's call, on the thread that runs it.
struct OperatorCall : at::ObserverContext {
  OperatorCall(const Operator& what, const at::RecordFunction& of) : op(what), call(of) {}

  const Operator& op;
  const at::RecordFunction& call;
  bool in_backward = false;
  bool records_gradient = false;  ///< autograd records it, and so may save its tensors; outside backward
  std::uint8_t heard = 0;         ///< bit i: listener i is to hear of its end

  /// From a few blocks that each thread keeps: one is made for nearly every operator.
  static void* operator new(std::size_t bytes);
  static void operator delete(void* block) noexcept;
};

/// Hears of every operator on every thread; LibTorch's observer of operators is asked once for all listeners,
/// since it costs about half a microsecond a call. Listeners live for ever.
class OperatorListener {
 public:
  /// Whether anything that this thread calls now is of interest; asked before what it is is looked up.
  virtual bool listens() const { return true; }
  /// Returns whether ends() is to be called as well. The operator runs in any case, and an exception is lost:
  /// a listener must keep an error that matters until it is called where it can throw. If it throws here, it
  /// must leave nothing behind.
  virtual bool begins(OperatorCall& call) = 0;
  virtual void ends(OperatorCall& call) noexcept = 0;
  /// Whether it hears also of ranges that are no operators: functions of autograd written in Python.
  virtual bool hears_ranges() const { return false; }
  /// Whether ends() reads call.call.outputs().
  virtual bool needs_outputs() const { return false; }

 protected:
  ~OperatorListener() = default;
};

/// While one lives, `listener` hears of operators. Counted: several may live. Between two listeners, the
/// first ever added is called first, at both ends.
class OperatorObservation {
 public:
  explicit OperatorObservation(OperatorListener& listener);
  ~OperatorObservation();
  OperatorObservation(const OperatorObservation&) = delete;
  OperatorObservation& operator=(const OperatorObservation&) = delete;

 private:
  std::size_t index_;
};

}  // namespace reef
