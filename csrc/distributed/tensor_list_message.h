#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reef/error.h"
#include "tensor_layout.h"

namespace reef {

/// Tensors that travel together from one rank to another: any number, of any dense dtypes and shapes, some of
/// them undefined. What precedes the values says all of this, so the receiver need not know it before.
struct TensorListMessage {
  std::vector<at::Tensor> tensors = {};  ///< what was received lies in order on the CPU
  /// The layout that each tensor had where it was made. Its strides are empty if the tensor was contiguous
  /// and aligned.
  std::vector<TensorLayout> layouts = {};
  std::vector<bool> requires_grad = {};  ///< of each tensor
  std::string failed = {};               ///< why there are no tensors, if what was to make them has failed

  /// Throws ConfigError in the name of the call `name` if a tensor cannot be sent.
  void check(const std::string& name) const;
};

/// What a description says of a tensor.
struct DescribedTensor {
  bool defined = false;
  bool requires_grad = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes = {};
  TensorLayout layout = {};

  /// Of its values; 0 if it is undefined.
  std::int64_t bytes() const;
};

/// Returns all of a message but the values of its tensors.
std::vector<std::int64_t> description_of(const TensorListMessage& message);

/// Returns the message without its tensors, and what is said of these. Throws std::out_of_range if `words`
/// are no description.
std::pair<TensorListMessage, std::vector<DescribedTensor>> described_by(
    const std::vector<std::int64_t>& words);

/// Returns the error for a message that is not number `number` of its route. `name` says which message it is.
ConfigError unexpected_message(const std::string& name, std::int64_t number);

/// Returns how many bytes of values each tensor has; 0 if it is undefined.
std::vector<std::int64_t> value_bytes(const std::vector<at::Tensor>& tensors);

}  // namespace reef
