#pragma once

#include <ATen/core/ivalue.h>

#include <functional>

namespace reef {

/// Calls `then` when the collective is over whose c10d::Work is among an operator's `outputs`: at once, on
/// this thread, where none is. A collective goes on with raw pointers when its operator has ended, so its
/// tensors must stay until then, however it was issued.
void when_over(c10::ArrayRef<c10::IValue> outputs, std::function<void()> then);

}  // namespace reef
