#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "checkpoint/observed_run.h"
#include "checkpoint/storage_copy.h"

namespace reef {

/// While one lives, what operators of this thread write into tensors that were there before it is put back
/// when it ends, and so are their versions: a function that is run once more must not count twice (the
/// running statistics of batch norm). Costs a copy of each storage. Not of tensors that are in a graph.
class WritesUndone final : public ObservedRun {
 public:
  WritesUndone();
  ~WritesUndone();

  /// Whether one lives on this thread.
  static bool is_in_force();
  /// Whether it is put back when the innermost scope of this thread ends.
  static bool puts_back(const at::Tensor& tensor);

 private:
  void about_to_run(const OperatorCall& call) override;
  void about_to_write(const at::Tensor& tensor);

  std::unordered_map<const c10::StorageImpl*, StorageCopy> written_;
  struct Version {
    c10::VariableVersion counter;
    std::uint32_t then;
  };
  std::vector<Version> versions_;
  WritesUndone* outer_scope_;
};

}  // namespace reef
