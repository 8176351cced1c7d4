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

/// Runs `call` on a thread of its own: what can wait for ever and cannot be interrupted. The thread outlives
/// this where nobody waited for the result, so `call` must own all that it uses; else all of that is gone
/// when result() returns.
template <class Call>
class Attempt {
 public:
  using Result = decltype(std::declval<Call>()());

  explicit Attempt(Call call) {
    std::packaged_task<Result()> task(std::move(call));
    future_ = task.get_future();
    thread_ = std::thread(std::move(task));
  }
  ~Attempt() {
    if (thread_.joinable()) thread_.detach();
  }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  bool is_over_by(Deadline deadline) { return future_.wait_until(deadline) == std::future_status::ready; }
  Result result() {
    thread_.join();
    return future_.get();
  }

 private:
  std::future<Result> future_;
  std::thread thread_;
};

/// The result of such an attempt, which is given up at the deadline: nullopt.
template <class Call>
auto within(Deadline deadline, Call call) -> std::optional<decltype(call())> {
  Attempt attempt(std::move(call));
  if (!attempt.is_over_by(deadline)) return std::nullopt;
  return attempt.result();
}

}  // namespace reef
