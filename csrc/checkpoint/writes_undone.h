#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <unordered_set>
#include <utility>
#include <vector>

#include "observer/observer.h"

namespace reef {

/// While one lives, what operators of this thread write into tensors that were there before it and require no
/// gradient is put back when it ends: a function that is run once more must not count twice (the running
/// statistics of batch norm). Costs a copy of each.
class WritesUndone {
 public:
  WritesUndone();
  ~WritesUndone();
  WritesUndone(const WritesUndone&) = delete;
  WritesUndone& operator=(const WritesUndone&) = delete;

  /// Whether it is put back when the innermost scope of this thread ends.
  static bool puts_back(const at::Tensor& tensor);

 private:
  class Listener;
  static Listener& listener();

  void about_to_run(const OperatorCall& call);
  void has_run(const OperatorCall& call);
  void about_to_write(const at::Tensor& tensor);

  WritesUndone* outer_;
  /// Of operators that have a kernel of their own: what these do inside, with memory that nobody has seen, is
  /// their business.
  int depth_ = 0;
  struct Written {
    at::Tensor tensor, before;
  };
  std::unordered_set<const c10::StorageImpl*> made_;  ///< by operators since
  std::vector<Written> written_;
  OperatorObservation observation_;
};

}  // namespace reef
