#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace reef {

using std::chrono::milliseconds;
using Deadline = std::chrono::steady_clock::time_point;

/// At least 1 ms: to c10d, 0 means no limit.
inline milliseconds time_left(Deadline deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
  return std::max(left, milliseconds{1});
}

inline bool has_passed(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }

/// "2.5 s", to the nearest hundredth.
inline std::string seconds_text(milliseconds duration) {
  const auto hundredths = (duration.count() + 5) / 10;
  auto text = std::to_string(static_cast<double>(hundredths) / 100.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) text.pop_back();
  return text + " s";
}

/// Runs `call` on a thread of its own and gives up on it at the deadline (nullopt): for what can wait for
/// ever and cannot be interrupted. The thread may outlive this function, so `call` must own all that it uses.
template <class Call>
auto within(Deadline deadline, Call call) -> std::optional<decltype(call())> {
  std::packaged_task<decltype(call())()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_until(deadline) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace reef
