#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>

namespace reef {

/// Calls `then` when the collective whose c10d::Work is among an operator's `outputs` is over. If there is
/// none, calls it at once on this thread. A collective uses raw pointers after its operator has ended, so its
/// tensors must stay in place until it is over, however it was issued.
void when_over(c10::ArrayRef<c10::IValue> outputs, std::function<void()> then);

/// Waits until a collective is over that does not report its end, such as those on devices, and calls its
/// `then`. Returns false if there is no such collective, or if none is over by `deadline`.
bool wait_for_collective(std::chrono::steady_clock::time_point deadline);

}  // namespace reef
