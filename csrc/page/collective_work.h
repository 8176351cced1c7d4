#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>

namespace reef {

/// Calls `then` when the collective is over whose c10d::Work is among an operator's `outputs`: at once, on
/// this thread, where none is. A collective goes on with raw pointers when its operator has ended, so its
/// tensors must stay until then, however it was issued.
void when_over(c10::ArrayRef<c10::IValue> outputs, std::function<void()> then);

/// Waits until a collective is over that does not say so by itself, as those of devices do not, and calls
/// what waits for it. Returns false if there is none, or if none is over by `deadline`.
bool wait_for_collective(std::chrono::steady_clock::time_point deadline);

}  // namespace reef
